"""Benchmarks of teacher_mixture and teacher_product."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.harness import ceiling, eager_forms, objective
from bench.harness.accuracy import LOGP, clear_places
from bench.harness.truth import checked_rows, in_chunks
from bench.harness.types import Benchmark, Case, Expected, Outputs, Provider, compiled, compiling, ours
from smopd.ops import Mixture, teacher_mixture, teacher_product

IDS_PER_CANDIDATE = 4  # ids per entry of kappa: teachers share most of their tokens
CLIP = 4.0  # nats, of the product


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


def product_inputs(case: Case, device: str) -> Inputs:
    """Return M models, the last is the reference, with the same M * kappa ids in different orders."""
    n_support = case.M * case.kappa
    logps_NMS = (torch.randn(case.N, case.M, n_support, device=device) * 3.0).log_softmax(-1)
    ids_NMS = torch.rand(case.N, case.M, n_support, device=device).argsort(-1).int()
    return Inputs(case, ids_NMS, logps_NMS, torch.ones(case.M - 1, device=device))


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


def pairs(ids_NMS: Tensor, logps_NMS: Tensor, weights_M: Tensor, kappa: int) -> tuple[Tensor, Tensor]:
    """Compute the product by comparing every id of the reference with every id of each teacher."""
    base_NS, logq_NS = logps_NMS[:, -1], logps_NMS[:, -1]
    for m, weight in enumerate(weights_M.unbind()):
        same_NSS = ids_NMS[:, -1, :, None] == ids_NMS[:, m, None, :]
        teacher_NS = logps_NMS[:, m, None, :].masked_fill(~same_NSS, -torch.inf).amax(-1)
        logq_NS = logq_NS + weight * (teacher_NS - base_NS).clamp(-CLIP, CLIP)
    top = logq_NS.log_softmax(-1).topk(kappa, dim=-1)
    return ids_NMS[:, -1].gather(-1, top.indices), top.values


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
    ),
    "teacher_product": Benchmark(
        cases={
            "cpu": (Case(N=8192, M=3, kappa=16, main=True),),
            "cuda": (Case(N=8192, M=3, kappa=16, main=True), Case(N=8192, M=5, kappa=64)),
        },
        inputs=product_inputs,
        truth=truth_of(lambda *args: objective.product(*args[:4], CLIP)),
        ceiling=lambda inputs: ceiling.launch_or_copy(inputs.logps_NMS),
        launch_bound=True,
        providers=(
            Provider(name="eager", run=run(pairs)),
            compiled(run(compiling(pairs))),
            *ours(fused(lambda *args: teacher_product(*args[:4], clip=CLIP))),
        ),
    ),
}
