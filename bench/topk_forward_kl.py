"""Benchmark of topk_forward_kl, forward and backward."""

from __future__ import annotations

import torch

from bench.harness import ceiling, eager_forms
from bench.harness.inputs import VOCABULARIES, Scenario, on_logits
from bench.harness.truth import loss_truth
from bench.harness.types import Benchmark, Case, Expected, Outputs, Provider, compiled, compiling, ours
from smopd.ops import topk_forward_kl


def truth(scenario: Scenario) -> dict[str, Expected]:
    return {name: value for name, value in loss_truth(scenario).items() if name != "loss"}


def inputs(case: Case, device: str) -> Scenario:
    """Return inputs of the KL without the policy gradient."""
    return on_logits(case, device).without_anchor()


def run(form):
    """Return a call that runs form(logits, tokens, settings) -> (logp_N, kl_N) and autograd's backward."""

    def call(scenario: Scenario) -> Outputs:
        logits_NV, tokens = scenario.logits_NV.detach().requires_grad_(), scenario.tokens
        logp_N, kl_N = form(logits_NV, tokens, scenario.settings)
        (dlogits_NV,) = torch.autograd.grad(kl_N, logits_NV, tokens.kl_weight_N)
        return {"logp": logp_N.detach(), "kl": kl_N.detach(), "dlogits": dlogits_NV}

    return call


def plain(logits_NV, tokens, settings):
    logq_NV = logits_NV.float().log_softmax(-1)
    logp_N = logq_NV.gather(-1, tokens.token_ids_N[:, None])[:, 0]
    return logp_N, eager_forms.forward_kl(logq_NV, *eager_forms.target_of(tokens, settings), settings.tail)


def fused(logits_NV, tokens, settings):
    target = (tokens.target_ids_NS, tokens.target_logps_NS)
    return topk_forward_kl(logits_NV, tokens.token_ids_N, *target, tail=settings.tail)


BENCHMARKS = {
    "topk_forward_kl": Benchmark(
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
        },
        inputs=inputs,
        truth=truth,
        ceiling=lambda scenario: ceiling.copy(scenario.logits_NV),
        providers=(
            Provider(name="eager", run=run(plain)),
            compiled(run(compiling(plain))),
            *ours(run(fused)),
        ),
    )
}
