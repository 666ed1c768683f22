"""linear_topk_logprobs: the same from hidden states, without holding the logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bench.harness import ceiling, eager_forms
from bench.harness.accuracy import LINEAR_NORM
from bench.harness.inputs import head_logits, random_head
from bench.harness.providers import compiled, compiling, eager, ours
from bench.harness.truth import checked_rows, in_chunks
from bench.harness.types import Benchmark, Case, Expected, Outputs
from smopd.ops import linear_topk_logprobs


@dataclass(frozen=True)
class Inputs:
    case: Case
    hidden_ND: Tensor
    weight_VD: Tensor


def inputs(case: Case, device: str) -> Inputs:
    return Inputs(case, *random_head(case, device))


def truth(given: Inputs) -> dict[str, Expected]:
    """The log-probabilities alone: the order of nearly equal tokens is up to the product's rounding."""
    rows = checked_rows(given.case.N, given.case.V, str(given.hidden_ND.device))
    logps = []
    for some in in_chunks(rows, given.case.V):
        logq = head_logits(given.hidden_ND[some], given.weight_VD).log_softmax(-1)
        logps.append(logq.topk(given.case.kappa, dim=-1).values)
    return {"logps": Expected(torch.cat(logps), LINEAR_NORM[given.case.torch_dtype], rows=rows, norm=True)}


def run(form):
    def call(given: Inputs) -> Outputs:
        ids_NS, logps_NS = form(given.hidden_ND, given.weight_VD, given.case.kappa)
        return {"ids": ids_NS, "logps": logps_NS}

    return call


def plain(hidden_ND: Tensor, weight_VD: Tensor, kappa: int) -> tuple[Tensor, Tensor]:
    return eager_forms.topk_of_logits(hidden_ND @ weight_VD.T, kappa)


def fused(hidden_ND: Tensor, weight_VD: Tensor, kappa: int) -> tuple[Tensor, Tensor]:
    top = linear_topk_logprobs(hidden_ND, weight_VD, kappa)
    return top.ids_NS, top.logps_NS


BENCHMARK = Benchmark(
    cases={
        "cpu": (
            Case(N=2048, V=151_936, D=512, kappa=16, repeats=3, main=True),
            Case(N=256, V=151_936, D=512, kappa=16, dtype="bfloat16"),
            Case(N=10_000, V=265, D=128, kappa=16),
        ),
        "cuda": (
            Case(N=8192, V=151_936, D=2048, kappa=16, dtype="bfloat16", main=True),
            Case(N=8192, V=151_936, D=1536, kappa=16, dtype="bfloat16"),
            Case(N=8192, V=151_936, D=3584, kappa=16, dtype="bfloat16"),
        ),
        "quick": (
            Case(N=9, V=40, D=8, kappa=3, main=True),
            Case(N=2, V=1271, D=16, kappa=16, dtype="bfloat16"),
        ),
        "check": (Case(N=41, V=1271, D=40, kappa=16), Case(N=5, V=151_936, D=64, kappa=64, dtype="bfloat16")),
    },
    inputs=inputs,
    truth=truth,
    ceilings=lambda given: [ceiling.gemm(given.hidden_ND, given.weight_VD)],
    providers=(
        eager("head, topk + logsumexp", run(plain)),
        compiled(run(compiling(plain))),
        *ours(run(fused)),
    ),
)
