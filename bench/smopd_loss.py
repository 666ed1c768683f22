"""smopd_loss: the whole objective with its gradient in the logits, also written over them."""

from __future__ import annotations

import functools

import torch

from bench import _ceilings, _eager, _peers
from bench._inputs import Scenario, on_logits
from bench._providers import PEER_SLACK, compiled, compiling, eager, ours, peer
from bench._truth import loss_truth
from bench._types import Benchmark, Case, Outputs
from smopd.ops import smopd_loss


def run(form):
    """form(logits, tokens, settings) -> loss and terms; the gradient is autograd's."""

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


BENCHMARK = Benchmark(
    cases={
        "cpu": (
            Case(N=256, V=151_936, kappa=16, main=True),
            Case(N=256, V=151_936, kappa=16, dtype="bfloat16"),
            Case(N=256, V=151_936, kappa=16, M=2, flags=("entropy",)),
            Case(N=10_000, V=265, kappa=16, M=2),
        ),
        "cuda": (
            Case(N=8192, V=151_936, kappa=16, M=2, dtype="bfloat16", main=True),
            Case(N=8192, V=151_936, kappa=16, M=2, dtype="bfloat16", flags=("entropy",)),
            Case(N=8192, V=151_936, kappa=64, dtype="bfloat16", flags=("tail",)),
        ),
        "quick": (
            Case(N=9, V=40, kappa=3, main=True),
            Case(N=4, V=1271, kappa=16, M=2, dtype="bfloat16", flags=("entropy",)),
        ),
        "check": (
            Case(N=1, V=7, kappa=3, flags=("tail",)),
            Case(N=41, V=1271, kappa=16, M=2, dtype="bfloat16", flags=("merge", "tail", "entropy", "masked")),
            Case(N=300, V=265, kappa=16, M=2, flags=("merge", "two-T", "masked")),
            Case(N=5, V=151_936, kappa=16, M=4, dtype="float16", flags=("merge", "tail", "two-T", "entropy")),
            Case(N=5, V=152_064, kappa=128, dtype="bfloat16", flags=("tail",)),
        ),
    },
    inputs=on_logits,
    truth=loss_truth,
    ceilings=lambda scenario: [
        _ceilings.copy(scenario.logits_NV),
        _ceilings.read(scenario.logits_NV),
        _ceilings.triad(scenario.logits_NV),
    ],
    providers=(
        eager("eager", run(_eager.objective)),
        eager("eager 16-bit", run(functools.partial(_eager.objective, wide=False)), slack=PEER_SLACK),
        compiled(run(compiling(_eager.objective))),
        *ours(run(fused)),
        *ours(run_in_place, "in place", prepare=own_logits),
        peer(
            "liger grpo",
            _peers.liger_grpo,
            "liger_kernel",
            devices=("cuda",),
            prepare=_peers.liger_grpo_input,
            note=_peers.GRPO_NOTE,
        ),
        peer("trl rows", _peers.trl_rows, "trl", devices=("cuda",), note=_peers.TRL_ROWS_NOTE),
    ),
)
