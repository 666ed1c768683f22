"""Benchmarks of smopd_loss (also in place) and linear_smopd_loss, forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.harness import ceiling, eager_forms, peers
from bench.harness.inputs import VOCABULARIES, Scenario, on_head, on_logits
from bench.harness.truth import loss_truth
from bench.harness.types import Benchmark, Case, Outputs, Provider, compiled, compiling, ours, peer
from smopd.ops import LossSettings, LossStats, LossTokens, linear_smopd_loss, smopd_loss


def run(form):
    """Return a call that runs form(*leaves, tokens, settings) -> (loss, terms) and autograd's backward."""

    def call(scenario: Scenario) -> Outputs:
        leaves = scenario.leaves()
        loss, terms = form(*leaves.values(), scenario.tokens, scenario.settings)
        gradients = torch.autograd.grad(loss, [*leaves.values()])
        named = {f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
        return {**terms, "loss": loss.detach(), **named}

    return call


def terms_of(stats: LossStats) -> Outputs:
    return {"logp": stats.logp_N, "kl": stats.kl_N, "entropy": stats.entropy_N}


def fused(logits_NV, tokens, settings, inplace=False):
    loss, stats = smopd_loss(logits_NV, tokens, settings, inplace=inplace)
    return loss, terms_of(stats)


def own_logits(scenario: Scenario) -> tuple:
    (leaf_NV,) = scenario.leaves().values()
    return scenario, leaf_NV, leaf_NV.clone()


def run_in_place(prepared: tuple) -> Outputs:
    scenario, leaf_NV, logits_NV = prepared
    loss, terms = fused(logits_NV, scenario.tokens, scenario.settings, inplace=True)
    (dlogits_NV,) = torch.autograd.grad(loss, leaf_NV)
    return {**terms, "loss": loss.detach(), "dlogits": dlogits_NV}


def linear(hidden_ND: Tensor, weight_VD: Tensor, tokens: LossTokens, settings: LossSettings):
    return eager_forms.objective(hidden_ND @ weight_VD.T, tokens, settings)


def fused_linear(hidden_ND: Tensor, weight_VD: Tensor, tokens: LossTokens, settings: LossSettings):
    loss, stats = linear_smopd_loss(hidden_ND, weight_VD, tokens, settings)
    return loss, terms_of(stats)


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
    ),
    "linear_smopd_loss": Benchmark(
        cases={
            "cpu": (
                Case(N=2048, V=151_936, D=512, kappa=16, repeats=3, main=True),
                Case(N=256, V=151_936, D=512, kappa=16, M=2, dtype="bfloat16"),
                Case(N=10_000, V=265, D=128, kappa=16, M=2),
                Case(N=4096, V=151_936, D=1536, kappa=16, repeats=1),
            ),
            "cuda": (
                Case(N=8192, V=151_936, D=2048, kappa=16, M=2, dtype="bfloat16", main=True),
                Case(N=8192, V=151_936, D=1536, kappa=16, M=2, dtype="bfloat16"),
                Case(N=8192, V=151_936, D=2048, kappa=16, M=2, dtype="bfloat16", flags=("merge", "tail")),
                Case(N=8192, V=151_936, D=3584, kappa=64, M=2, dtype="bfloat16"),
            ),
        },
        inputs=on_head,
        truth=loss_truth,
        ceiling=lambda scenario: ceiling.three_gemms(scenario.hidden_ND, scenario.weight_VD),
        providers=(
            Provider(name="eager", run=run(linear)),
            compiled(run(compiling(linear))),
            *ours(run(fused_linear)),
            peer("trl chunked", peers.trl_linear, "trl", peers.TRL_NOTE),
            peer("liger", peers.liger_linear, "liger_kernel", peers.LABEL_NOTE, devices=("cuda",)),
            peer("cce", peers.cut_cross_entropy, "cut_cross_entropy", peers.LABEL_NOTE, main_only=True),
        ),
    ),
}
