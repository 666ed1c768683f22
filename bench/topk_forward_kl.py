"""topk_forward_kl: log-probability and forward KL to a sparse target, forward and backward."""

from __future__ import annotations

import torch

from bench.harness import ceiling, eager_forms, peers
from bench.harness.inputs import VOCABULARIES, Scenario, on_logits
from bench.harness.providers import PEER_SLACK, compiled, compiling, eager, ours, peer
from bench.harness.truth import loss_truth
from bench.harness.types import Benchmark, Case, Expected, Outputs
from smopd.ops import topk_forward_kl


def truth(scenario: Scenario) -> dict[str, Expected]:
    return {name: value for name, value in loss_truth(scenario).items() if name != "loss"}


def inputs(case: Case, device: str) -> Scenario:
    """The KL alone: no anchor in the truth's gradient either."""
    scenario = on_logits(case, device)
    return scenario.without_anchor()


def run(form):
    """form(logits, tokens, settings) -> log-probability and KL of each token; the gradient is autograd's."""

    def call(scenario: Scenario) -> Outputs:
        logits_NV, tokens = scenario.logits_NV.detach().requires_grad_(), scenario.tokens
        logp_N, kl_N = form(logits_NV, tokens, scenario.settings)
        counted_N = tokens.kl_weight_N != 0
        (dlogits_NV,) = torch.autograd.grad(kl_N, logits_NV, tokens.kl_weight_N)
        return {"logp": logp_N.detach() * counted_N, "kl": kl_N.detach() * counted_N, "dlogits": dlogits_NV}

    return call


def plain(logits_NV, tokens, settings):
    return of_log_softmax(logits_NV.float().log_softmax(-1), tokens, settings)


def narrow(logits_NV, tokens, settings):
    """The log-softmax in the logits' dtype: half the memory, a hundredth of a nat."""
    return of_log_softmax(logits_NV.log_softmax(-1), tokens, settings)


def of_log_softmax(logq_NV, tokens, settings):
    logp_N = logq_NV.gather(-1, tokens.token_ids_N[:, None])[:, 0].float()
    return logp_N, eager_forms.forward_kl(logq_NV, *eager_forms.target_of(tokens, settings), settings.tail)


def fused(logits_NV, tokens, settings):
    target = (tokens.target_ids_NS, tokens.target_logps_NS)
    return topk_forward_kl(logits_NV, tokens.token_ids_N, *target, tail=settings.tail)


def ceilings(scenario: Scenario) -> list[ceiling.Ceiling]:
    return [ceiling.copy(scenario.logits_NV), ceiling.read(scenario.logits_NV)]


EAGER = (
    eager("eager", run(plain)),
    eager("eager 16-bit", run(narrow), slack=PEER_SLACK),
    compiled(run(compiling(plain))),
)
BENCHMARK = Benchmark(
    cases={
        "cpu": (
            Case(N=256, V=151_936, kappa=16, main=True),
            Case(N=256, V=151_936, kappa=16, dtype="bfloat16"),
            Case(N=10_000, V=265, kappa=16, flags=("tail",)),
        ),
        "cuda": (
            Case(N=8192, V=151_936, kappa=16, dtype="bfloat16", main=True),
            Case(N=8192, V=151_936, kappa=64, dtype="bfloat16", flags=("tail",)),
            *(Case(N=n, V=v, kappa=16, dtype="bfloat16") for n, v in VOCABULARIES),
        ),
        "quick": (
            Case(N=9, V=40, kappa=3, main=True),
            Case(N=4, V=1271, kappa=16, dtype="bfloat16", flags=("tail",)),
        ),
        "check": (
            Case(N=1, V=7, kappa=3, flags=("tail",)),
            Case(N=41, V=1271, kappa=16, dtype="bfloat16", flags=("masked",)),
            Case(N=5, V=151_936, kappa=128, dtype="float16", flags=("tail",)),
        ),
    },
    inputs=inputs,
    truth=truth,
    ceilings=ceilings,
    providers=(
        *EAGER,
        *ours(run(fused)),
        peer("liger kl_div", peers.liger_kl, "liger_kernel", devices=("cuda",), note=peers.LIGER_NOTE),
    ),
)
