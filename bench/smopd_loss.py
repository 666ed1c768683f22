"""Benchmark of smopd_loss with its gradient, also in place."""

from __future__ import annotations

import torch

from bench.harness import ceiling, eager_forms, peers
from bench.harness.inputs import VOCABULARIES, Scenario, on_logits
from bench.harness.truth import loss_truth
from bench.harness.types import Benchmark, Case, Outputs, Provider, compiled, compiling, ours, peer
from smopd.ops import smopd_loss


def run(form):
    """Time form(logits, tokens, settings) -> loss, terms with autograd's backward."""

    def call(scenario: Scenario) -> Outputs:
        logits_NV = scenario.logits_NV.detach().requires_grad_()
        loss, terms = form(logits_NV, scenario.tokens, scenario.settings)
        (dlogits_NV,) = torch.autograd.grad(loss, logits_NV)
        return {**terms, "loss": loss.detach(), "dlogits": dlogits_NV}

    return call


def fused(logits_NV, tokens, settings, inplace=False):
    loss, stats = smopd_loss(logits_NV, tokens, settings, inplace=inplace)
    return loss, {"logp": stats.logp_N, "kl": stats.kl_N, "entropy": stats.entropy_N}


def own_logits(scenario: Scenario) -> tuple:
    leaf_NV = scenario.logits_NV.detach().requires_grad_()
    return scenario, leaf_NV, leaf_NV.clone()


def run_in_place(prepared: tuple) -> Outputs:
    scenario, leaf_NV, logits_NV = prepared
    loss, terms = fused(logits_NV, scenario.tokens, scenario.settings, inplace=True)
    (dlogits_NV,) = torch.autograd.grad(loss, leaf_NV)
    return {**terms, "loss": loss.detach(), "dlogits": dlogits_NV}


GRPO = {"devices": ("cuda",), "prepare": peers.liger_grpo_input, "note": peers.GRPO_NOTE}
BENCHMARKS = {
    "smopd_loss": Benchmark(
        cases={
            "cpu": (
                Case(N=256, V=151_936, kappa=16, main=True),
                Case(N=256, V=151_936, kappa=16, dtype="bfloat16"),
                Case(N=256, V=151_936, kappa=16, M=2, flags=("entropy",)),
                Case(N=256, V=151_936, kappa=16, M=2, dtype="bfloat16", flags=("merge", "tail")),
                Case(N=10_000, V=265, kappa=16, M=2),
            ),
            "cuda": (
                Case(N=8192, V=151_936, kappa=16, M=2, dtype="bfloat16", main=True),
                Case(N=8192, V=151_936, kappa=16, M=2, dtype="bfloat16", flags=("merge", "tail")),
                Case(N=8192, V=151_936, kappa=16, M=2, dtype="bfloat16", flags=("entropy",)),
                Case(N=8192, V=151_936, kappa=64, dtype="bfloat16", flags=("tail",)),
                *(Case(N=n, V=v, kappa=16, M=2, dtype="bfloat16") for n, v in VOCABULARIES),
            ),
        },
        inputs=on_logits,
        truth=loss_truth,
        ceiling=lambda scenario: ceiling.copy(scenario.logits_NV),
        providers=(
            Provider(name="eager", run=run(eager_forms.objective)),
            compiled(run(compiling(eager_forms.objective))),
            *ours(run(fused)),
            *ours(run_in_place, "in place", prepare=own_logits),
            peer("liger grpo", peers.liger_grpo, "liger_kernel", **GRPO),
        ),
    )
}
