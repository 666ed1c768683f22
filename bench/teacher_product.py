"""teacher_product: a reference and what each teacher changed of it, on the union of their candidates."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bench.harness import ceiling, objective
from bench.harness.accuracy import LOGP
from bench.harness.providers import compiled, compiling, eager, ours
from bench.harness.truth import checked_rows, in_chunks
from bench.harness.types import Benchmark, Case, Expected, Outputs
from smopd.ops import teacher_product

CLIP = 4.0


@dataclass(frozen=True)
class Inputs:
    case: Case
    ids_NMS: Tensor
    logps_NMS: Tensor
    weights_M: Tensor


def inputs(case: Case, device: str) -> Inputs:
    """M models with the reference, each with M * kappa ids in an order of its own."""
    n_support = case.M * case.kappa
    logps_NMS = (torch.randn(case.N, case.M, n_support, device=device) * 3.0).log_softmax(-1)
    ids_NMS = torch.rand(case.N, case.M, n_support, device=device).argsort(-1).int()
    return Inputs(case, ids_NMS, logps_NMS, torch.ones(case.M - 1, device=device))


def truth(given: Inputs) -> dict[str, Expected]:
    width = (given.case.M * given.case.kappa) ** 2 * given.case.M
    rows = checked_rows(given.case.N, width, str(given.ids_NMS.device))
    parts = []
    for some in in_chunks(rows, width):
        models = (given.ids_NMS[some], given.logps_NMS[some], given.weights_M)
        parts.append(objective.product(*models, given.case.kappa, CLIP))
    ids, logps = (torch.cat(column) for column in zip(*parts, strict=True))
    expected = {
        "logps": Expected(logps, LOGP, rows=rows),
        "mass": Expected(logps.exp().sum(-1), LOGP, rows=rows),
    }
    return expected | {"ids": Expected(ids, rows=rows, exact=True)}


def pairs(ids_NMS: Tensor, logps_NMS: Tensor, weights_M: Tensor, kappa: int) -> tuple[Tensor, Tensor]:
    """Every id of the reference compared with every one of each teacher."""
    base_NS, logq_NS = logps_NMS[:, -1], logps_NMS[:, -1]
    for m, weight in enumerate(weights_M.unbind()):
        same_NSS = ids_NMS[:, -1, :, None] == ids_NMS[:, m, None, :]
        said_NS = logps_NMS[:, m, None, :].masked_fill(~same_NSS, -torch.inf).amax(-1)
        logq_NS = logq_NS + weight * (said_NS - base_NS).clamp(-CLIP, CLIP)
    top = logq_NS.log_softmax(-1).topk(kappa, dim=-1)
    return ids_NMS[:, -1].gather(-1, top.indices), top.values


def run(form):
    def call(given: Inputs) -> Outputs:
        ids_NS, logps_NS = form(given.ids_NMS, given.logps_NMS, given.weights_M, given.case.kappa)
        return {"ids": ids_NS, "logps": logps_NS, "mass": logps_NS.exp().sum(-1)}

    return call


def fused(given: Inputs) -> Outputs:
    models = (given.ids_NMS, given.logps_NMS, given.weights_M)
    product = teacher_product(*models, given.case.kappa, clip=CLIP)
    return {"ids": product.ids_NS, "logps": product.logps_NS, "mass": product.mass_N}


def ceilings(given: Inputs) -> list[ceiling.Ceiling]:
    if given.ids_NMS.is_cuda:
        return [ceiling.launch(given.ids_NMS)]
    return [ceiling.copy(given.logps_NMS)]


BENCHMARK = Benchmark(
    cases={
        "cpu": (Case(N=8192, M=3, kappa=16, main=True),),
        "cuda": (Case(N=8192, M=3, kappa=16, main=True), Case(N=8192, M=5, kappa=64)),
        "quick": (Case(N=9, M=3, kappa=4, main=True),),
        "check": (Case(N=1, M=2, kappa=1), Case(N=41, M=3, kappa=10), Case(N=7, M=4, kappa=64)),
    },
    inputs=inputs,
    truth=truth,
    ceilings=ceilings,
    launch_bound=True,
    providers=(eager("eager", run(pairs)), compiled(run(compiling(pairs))), *ours(fused)),
)
