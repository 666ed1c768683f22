"""teacher_forward_kl: topk_forward_kl from the teachers' own candidates, joined in the same kernel."""

from __future__ import annotations

from bench.harness.providers import ours
from bench.harness.types import Benchmark, Case
from bench.topk_forward_kl import EAGER, ceilings, inputs, run, truth
from smopd.ops import teacher_forward_kl, teacher_mixture, topk_forward_kl


def fused(logits_NV, tokens, settings):
    return teacher_forward_kl(
        logits_NV,
        tokens.token_ids_N,
        tokens.teacher_ids_NMS,
        tokens.teacher_logps_NMS,
        tokens.log_alpha,
        settings.kappa,
        merge=settings.merge,
        tail=settings.tail,
    )


def in_two(logits_NV, tokens, settings):
    """The mixture by a call of its own."""
    teachers = (tokens.teacher_ids_NMS, tokens.teacher_logps_NMS, tokens.log_alpha)
    target = teacher_mixture(*teachers, settings.kappa, merge=settings.merge)
    return topk_forward_kl(logits_NV, tokens.token_ids_N, target.ids_NS, target.logps_NS, tail=settings.tail)


BENCHMARK = Benchmark(
    cases={
        "cpu": (
            Case(N=256, V=151_936, kappa=16, M=2, main=True),
            Case(N=256, V=151_936, kappa=64, M=4, dtype="bfloat16", flags=("merge", "tail")),
            Case(N=10_000, V=265, kappa=16, M=2),
        ),
        "cuda": (
            Case(N=8192, V=151_936, kappa=16, M=2, dtype="bfloat16", main=True),
            Case(N=8192, V=151_936, kappa=32, M=4, dtype="bfloat16", flags=("merge", "tail")),
        ),
        "quick": (
            Case(N=9, V=40, kappa=3, M=2, main=True),
            Case(N=4, V=1271, kappa=16, M=3, dtype="bfloat16", flags=("merge", "tail")),
        ),
        "check": (
            Case(N=1, V=7, kappa=3, M=1, flags=("tail",)),
            Case(N=41, V=1271, kappa=16, M=2, dtype="bfloat16", flags=("masked",)),
            Case(N=5, V=151_936, kappa=64, M=4, dtype="float16", flags=("merge", "tail")),
        ),
    },
    inputs=inputs,
    truth=truth,
    ceilings=ceilings,
    providers=(*EAGER, *ours(run(fused)), *ours(run(in_two), "in two")),
)
