"""Benchmark of linear_smopd_loss with the gradients of hidden states and weight."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.harness import ceiling, eager_forms, peers
from bench.harness.inputs import Scenario, on_head
from bench.harness.peers import head_leaves
from bench.harness.truth import loss_truth
from bench.harness.types import Benchmark, Case, Outputs, Provider, compiled, compiling, ours, peer
from smopd.ops import LossSettings, LossTokens, linear_smopd_loss


def run(form):
    def call(scenario: Scenario) -> Outputs:
        leaves = head_leaves(scenario)
        loss, terms = form(*leaves, scenario.tokens, scenario.settings)
        dhidden_ND, dweight_VD = torch.autograd.grad(loss, leaves)
        return {**terms, "loss": loss.detach(), "dhidden": dhidden_ND, "dweight": dweight_VD}

    return call


def plain(hidden_ND: Tensor, weight_VD: Tensor, tokens: LossTokens, settings: LossSettings):
    return eager_forms.objective(hidden_ND @ weight_VD.T, tokens, settings)


def fused(hidden_ND: Tensor, weight_VD: Tensor, tokens: LossTokens, settings: LossSettings):
    loss, stats = linear_smopd_loss(hidden_ND, weight_VD, tokens, settings)
    return loss, {"logp": stats.logp_N, "kl": stats.kl_N, "entropy": stats.entropy_N}


BENCHMARKS = {
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
            Provider(name="eager", run=run(plain)),
            compiled(run(compiling(plain))),
            *ours(run(fused)),
            peer("trl chunked", peers.trl_linear, "trl", peers.TRL_NOTE),
            peer("liger", peers.liger_linear, "liger_kernel", peers.LABEL_NOTE, devices=("cuda",)),
            peer("cce", peers.cut_cross_entropy, "cut_cross_entropy", peers.LABEL_NOTE, main_only=True),
        ),
    )
}
