"""Benchmarks of teacher_mixture."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.harness import ceiling, eager_forms, objective
from bench.harness.accuracy import LOGP, clear_places
from bench.harness.truth import checked_rows, in_chunks
from bench.harness.types import Benchmark, Case, Expected, Outputs, Provider, compiled, compiling, ours
from smopd.ops import teacher_mixture

IDS_PER_CANDIDATE = 4  # ids / kappa: few, because real teachers share most of their tokens


@dataclass(frozen=True)
class Inputs:
    case: Case
    ids_NMS: Tensor
    logps_NMS: Tensor
    log_alpha: Tensor

    @property
    def merge(self) -> bool:
        return "merge" in self.case.flags


def mixture_inputs(case: Case, device: str) -> Inputs:
    logits = torch.randn(case.N, case.M, IDS_PER_CANDIDATE * case.kappa, device=device) * 3.0
    logps_NMS, ids_NMS = logits.log_softmax(-1).topk(case.kappa, dim=-1)
    log_alpha = torch.full((case.M,), -math.log(case.M), device=device)
    return Inputs(case, ids_NMS.to(torch.int32), logps_NMS, log_alpha)


def truth(inputs: Inputs) -> dict[str, Expected]:
    """Return the true results, which are computed with kappa + 1 entries for `clear_places`."""
    kappa, width = inputs.case.kappa, inputs.ids_NMS[0].numel() ** 2
    rows = checked_rows(inputs.case.N, width, str(inputs.ids_NMS.device))
    parts = [
        objective.mixture(
            inputs.ids_NMS[some], inputs.logps_NMS[some], inputs.log_alpha, kappa + 1, inputs.merge
        )
        for some in in_chunks(rows, width)
    ]
    ids, values = (torch.cat(column) for column in zip(*parts, strict=True))
    logps = values[:, :kappa]
    return {
        "ids": Expected(ids[:, :kappa], rows=rows, exact=clear_places(values, kappa)),
        "logps": Expected(logps, LOGP, rows=rows),
        "mass": Expected(logps.exp().sum(-1), LOGP, rows=rows),
    }


def run(plain, merged):
    def call(inputs: Inputs) -> Outputs:
        form = merged if inputs.merge else plain
        ids_NS, logps_NS = form(inputs.ids_NMS, inputs.logps_NMS, inputs.log_alpha, inputs.case.kappa)
        return {"ids": ids_NS, "logps": logps_NS, "mass": logps_NS.exp().sum(-1)}

    return call


def fused(inputs: Inputs) -> Outputs:
    target = teacher_mixture(
        inputs.ids_NMS, inputs.logps_NMS, inputs.log_alpha, inputs.case.kappa, merge=inputs.merge
    )
    return {"ids": target.ids_NS, "logps": target.logps_NS, "mass": target.mass_N}


BENCHMARKS = {
    "teacher_mixture": Benchmark(
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
        },
        inputs=mixture_inputs,
        truth=truth,
        ceiling=lambda inputs: ceiling.launch_or_copy(inputs.logps_NMS),
        launch_bound=True,
        providers=(
            Provider(name="eager", run=run(eager_forms.pooled, eager_forms.merged)),
            compiled(run(compiling(eager_forms.pooled), compiling(eager_forms.merged))),
            *ours(fused),
        ),
    )
}
