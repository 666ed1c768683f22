"""teacher_mixture: several teachers' candidates joined and cut to kappa, pooled or merged."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.harness import ceiling, eager_forms, objective
from bench.harness.accuracy import LOGP, ULPS, ulp
from bench.harness.providers import compiled, compiling, eager, ours
from bench.harness.truth import checked_rows, in_chunks
from bench.harness.types import Benchmark, Case, Expected, Outputs, Ranking
from smopd.ops import teacher_mixture

IDS_PER_CANDIDATE = 4  # teachers share most of their tokens: ids come from this many times kappa


@dataclass(frozen=True)
class Inputs:
    case: Case
    ids_NMS: Tensor
    logps_NMS: Tensor
    log_alpha: Tensor

    @property
    def merge(self) -> bool:
        return "merge" in self.case.flags


def inputs(case: Case, device: str) -> Inputs:
    logits = torch.randn(case.N, case.M, IDS_PER_CANDIDATE * case.kappa, device=device) * 3.0
    logps_NMS, ids_NMS = logits.log_softmax(-1).topk(case.kappa, dim=-1)
    log_alpha = torch.full((case.M,), -math.log(case.M), device=device)
    return Inputs(case, ids_NMS.to(torch.int32), logps_NMS, log_alpha)


def truth(given: Inputs) -> dict[str, Expected]:
    width = (given.case.M * given.case.kappa) ** (2 if given.merge else 1)
    rows = checked_rows(given.case.N, width, str(given.ids_NMS.device))
    n_candidates, kappa = given.case.M * given.case.kappa, given.case.kappa
    parts = []
    for some in in_chunks(rows, width):
        teachers = (given.ids_NMS[some], given.logps_NMS[some], given.log_alpha)
        parts.append(objective.mixture(*teachers, n_candidates, given.merge))
    ids, values = (torch.cat(column) for column in zip(*parts, strict=True))
    ranking = Ranking(ids, values, _rounding(values, given.merge))
    logps = values[:, :kappa]
    expected = {
        "logps": Expected(logps, LOGP, rows=rows),
        "mass": Expected(logps.exp().sum(-1), LOGP, rows=rows),
    }
    return expected | {"ids": Expected(ids[:, :kappa], rows=rows, exact=True, ranking=ranking)}


def _rounding(values: Tensor, merge: bool) -> Tensor:
    """How far from its truth each value may be in fp32: a sum rounded once, or a logsumexp."""
    if merge:
        return ULPS[torch.float32] * ulp(values.abs().clamp(min=1.0), torch.float32)
    return ulp(values, torch.float32) / 2


def run(pooled, merged):
    def call(given: Inputs) -> Outputs:
        form = merged if given.merge else pooled
        ids_NS, logps_NS = form(given.ids_NMS, given.logps_NMS, given.log_alpha, given.case.kappa)
        return {"ids": ids_NS, "logps": logps_NS, "mass": logps_NS.exp().sum(-1)}

    return call


def fused(given: Inputs) -> Outputs:
    teachers = (given.ids_NMS, given.logps_NMS, given.log_alpha)
    mixture = teacher_mixture(*teachers, given.case.kappa, merge=given.merge)
    return {"ids": mixture.ids_NS, "logps": mixture.logps_NS, "mass": mixture.mass_N}


def ceilings(given: Inputs) -> list[ceiling.Ceiling]:
    if given.ids_NMS.is_cuda:
        return [ceiling.launch(given.ids_NMS)]
    return [ceiling.copy(given.logps_NMS)]


BENCHMARK = Benchmark(
    cases={
        "cpu": (
            Case(N=8192, M=2, kappa=16, main=True),
            Case(N=8192, M=2, kappa=16, flags=("merge",)),
            Case(N=8192, M=4, kappa=64),
        ),
        "cuda": (
            Case(N=8192, M=2, kappa=16, main=True),
            Case(N=8192, M=2, kappa=16, flags=("merge",)),
            Case(N=8192, M=4, kappa=64),
            Case(N=8192, M=8, kappa=64),
        ),
        "quick": (Case(N=9, M=2, kappa=4, main=True), Case(N=5, M=3, kappa=8, flags=("merge",))),
        "check": (
            Case(N=1, M=1, kappa=1),
            Case(N=41, M=3, kappa=10),
            Case(N=300, M=2, kappa=16, flags=("merge",)),
            Case(N=7, M=4, kappa=128, flags=("merge",)),
        ),
    },
    inputs=inputs,
    truth=truth,
    ceilings=ceilings,
    launch_bound=True,
    providers=(
        eager("eager", run(eager_forms.pooled, eager_forms.merged)),
        compiled(run(compiling(eager_forms.pooled), compiling(eager_forms.merged))),
        *ours(fused),
    ),
)
