"""Benchmark of gdpo_advantages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bench.harness import ceiling, eager_forms
from bench.harness.types import Benchmark, Case, Expected, Outputs, Provider, compiled, compiling, ours
from smopd.ops import gdpo_advantages

NORM_EPS = 1e-6
BOUND = 2e-5


@dataclass(frozen=True)
class Inputs:
    """N responses, in N / G groups of adjacent responses."""

    case: Case
    rewards_RK: Tensor
    group_R: Tensor
    weights_K: Tensor


def inputs(case: Case, device: str) -> Inputs:
    group_R = torch.arange(case.N // case.G, device=device).repeat_interleave(case.G)
    rewards_RK = torch.randn(case.N, case.K, device=device)
    return Inputs(case, rewards_RK, group_R, torch.linspace(1.0, 2.0, case.K, device=device))


def truth(given: Inputs) -> dict[str, Expected]:
    wide = (given.rewards_RK.double(), given.case.G, given.weights_K.double(), NORM_EPS)
    return {"advantages": Expected(eager_forms.gdpo_stacked(*wide), BOUND)}


def stacked(form):
    def call(given: Inputs) -> Outputs:
        return {"advantages": form(given.rewards_RK, given.case.G, given.weights_K, NORM_EPS)}

    return call


def fused(given: Inputs) -> Outputs:
    options = {"weights_K": given.weights_K, "norm_eps": NORM_EPS}
    return {"advantages": gdpo_advantages(given.rewards_RK, given.group_R, **options)}


BENCHMARKS = {
    "advantages": Benchmark(
        cases={
            "cpu": (Case(N=16_384, K=4, G=16, main=True), Case(N=256, K=2, G=8)),
            "cuda": (Case(N=16_384, K=4, G=16, main=True), Case(N=4096, K=2, G=8)),
        },
        inputs=inputs,
        truth=truth,
        ceiling=lambda given: ceiling.launch_or_copy(given.rewards_RK),
        launch_bound=True,
        providers=(
            Provider(name="eager", run=stacked(eager_forms.gdpo_stacked)),
            compiled(stacked(compiling(eager_forms.gdpo_stacked))),
            *ours(fused, backends=("reference", "triton")),
        ),
    )
}
