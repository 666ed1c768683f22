"""advantages: gdpo_advantages of several rewards, normalised in their groups, weighted and whitened."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bench.harness import ceiling, eager_forms
from bench.harness.providers import compiled, compiling, eager, ours
from bench.harness.types import Benchmark, Case, Expected, Outputs
from smopd.ops import gdpo_advantages

NORM_EPS = 1e-6
BOUND = 2e-5


@dataclass(frozen=True)
class Inputs:
    """N responses in N / G groups that stand together."""

    case: Case
    rewards_RK: Tensor
    group_R: Tensor
    weights_K: Tensor
    prompts: list[int]


def inputs(case: Case, device: str) -> Inputs:
    group_R = torch.arange(case.N // case.G, device=device).repeat_interleave(case.G)
    rewards_RK = torch.randn(case.N, case.K, device=device)
    weights_K = torch.linspace(1.0, 2.0, case.K, device=device)
    return Inputs(case, rewards_RK, group_R, weights_K, group_R.tolist())


def truth(given: Inputs) -> dict[str, Expected]:
    rewards_BGK = given.rewards_RK.double().view(-1, given.case.G, given.case.K)
    spread_BGK = rewards_BGK.std(1, keepdim=True) + NORM_EPS
    normalised_BGK = (rewards_BGK - rewards_BGK.mean(1, keepdim=True)) / spread_BGK
    sums_R = (normalised_BGK * given.weights_K.double()).sum(-1).flatten()
    return {"advantages": Expected((sums_R - sums_R.mean()) / (sums_R.std() + NORM_EPS), BOUND)}


def stacked(form):
    def call(given: Inputs) -> Outputs:
        return {"advantages": form(given.rewards_RK, given.case.G, given.weights_K, NORM_EPS)}

    return call


def by_prompt(given: Inputs) -> Outputs:
    advantages = eager_forms.gdpo_by_prompt(given.rewards_RK, given.prompts, given.weights_K, NORM_EPS)
    return {"advantages": advantages}


def fused(given: Inputs) -> Outputs:
    advantages_R = gdpo_advantages(
        given.rewards_RK, given.group_R, weights_K=given.weights_K, norm_eps=NORM_EPS
    )
    return {"advantages": advantages_R}


def ceilings(given: Inputs) -> list[ceiling.Ceiling]:
    if given.rewards_RK.is_cuda:
        return [ceiling.launch(given.rewards_RK)]
    return [ceiling.copy(given.rewards_RK)]


BENCHMARK = Benchmark(
    cases={
        "cpu": (Case(N=16_384, K=4, G=16, main=True), Case(N=256, K=2, G=8)),
        "cuda": (Case(N=16_384, K=4, G=16, main=True), Case(N=4096, K=2, G=8)),
        "quick": (Case(N=12, K=2, G=4, main=True),),
        "check": (Case(N=2, K=1, G=2), Case(N=60, K=3, G=5), Case(N=2048, K=4, G=16)),
    },
    inputs=inputs,
    truth=truth,
    ceilings=ceilings,
    launch_bound=True,
    providers=(
        eager("eager", stacked(eager_forms.gdpo_stacked)),
        eager("eager by prompt", by_prompt),
        compiled(stacked(compiling(eager_forms.gdpo_stacked))),
        *ours(fused, backends=("reference", "triton")),
    ),
)
