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
from smopd.ops import Mixture, teacher_mixture

IDS_PER_CANDIDATE = 4  # ids per entry of kappa: teachers share most of their tokens


@dataclass(frozen=True)
class Inputs:
    case: Case
    ids_NMS: Tensor
    logps_NMS: Tensor
    weights_M: Tensor
    """log_alpha of the mixture, or weights of the product."""

    @property
    def merge(self) -> bool:
        return "merge" in self.case.flags


def mixture_inputs(case: Case, device: str) -> Inputs:
    logits = torch.randn(case.N, case.M, IDS_PER_CANDIDATE * case.kappa, device=device) * 3.0
    logps_NMS, ids_NMS = logits.log_softmax(-1).topk(case.kappa, dim=-1)
    log_alpha = torch.full((case.M,), -math.log(case.M), device=device)
    return Inputs(case, ids_NMS.to(torch.int32), logps_NMS, log_alpha)


def truth_of(target):
    """Return the truth of target(ids, logps, weights, kappa, inputs), computed with one entry more."""

    def truth(inputs: Inputs) -> dict[str, Expected]:
        kappa, width = inputs.case.kappa, inputs.ids_NMS[0].numel() ** 2
        rows = checked_rows(inputs.case.N, width, str(inputs.ids_NMS.device))
        parts = [
            target(inputs.ids_NMS[some], inputs.logps_NMS[some], inputs.weights_M, kappa + 1, inputs)
            for some in in_chunks(rows, width)
        ]
        ids, values = (torch.cat(column) for column in zip(*parts, strict=True))
        logps = values[:, :kappa]
        return {
            "ids": Expected(ids[:, :kappa], rows=rows, exact=clear_places(values, kappa)),
            "logps": Expected(logps, LOGP, rows=rows),
            "mass": Expected(logps.exp().sum(-1), LOGP, rows=rows),
        }

    return truth


def run(plain, merged=None):
    def call(inputs: Inputs) -> Outputs:
        form = merged if inputs.merge else plain
        ids_NS, logps_NS = form(inputs.ids_NMS, inputs.logps_NMS, inputs.weights_M, inputs.case.kappa)
        return {"ids": ids_NS, "logps": logps_NS, "mass": logps_NS.exp().sum(-1)}

    return call


def fused(form):
    """Time form(ids, logps, weights, kappa, inputs) -> Mixture."""

    def call(inputs: Inputs) -> Outputs:
        arguments = (inputs.ids_NMS, inputs.logps_NMS, inputs.weights_M, inputs.case.kappa)
        target: Mixture = form(*arguments, inputs)
        return {"ids": target.ids_NS, "logps": target.logps_NS, "mass": target.mass_N}

    return call


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
        truth=truth_of(lambda *args: objective.mixture(*args[:4], args[4].merge)),
        ceiling=lambda inputs: ceiling.launch_or_copy(inputs.logps_NMS),
        launch_bound=True,
        providers=(
            Provider(name="eager", run=run(eager_forms.pooled, eager_forms.merged)),
            compiled(run(compiling(eager_forms.pooled), compiling(eager_forms.merged))),
            *ours(fused(lambda *args: teacher_mixture(*args[:4], merge=args[4].merge))),
        ),
    )
}
