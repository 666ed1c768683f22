"""topk_logprobs: the kappa most likely tokens of each row of logits, beside torch.topk with logsumexp."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bench.harness import ceiling, eager_forms, peers
from bench.harness.accuracy import LOGP
from bench.harness.inputs import VOCABULARIES, random_logits
from bench.harness.providers import compiled, compiling, eager, ours, peer
from bench.harness.truth import checked_rows, in_chunks
from bench.harness.types import Benchmark, Case, Expected, Outputs
from smopd.ops import topk_logprobs


@dataclass(frozen=True)
class Inputs:
    case: Case
    logits_NV: Tensor


def inputs(case: Case, device: str) -> Inputs:
    return Inputs(case, random_logits(case, device))


def truth(given: Inputs) -> dict[str, Expected]:
    rows = checked_rows(given.case.N, given.case.V, str(given.logits_NV.device))
    ids, logps = [], []
    for some in in_chunks(rows, given.case.V):
        logq = given.logits_NV[some].double().log_softmax(-1)
        ids.append(logq.sort(dim=-1, descending=True, stable=True).indices[:, : given.case.kappa])
        logps.append(logq.gather(-1, ids[-1]))
    return {
        "ids": Expected(torch.cat(ids), rows=rows, exact=True),
        "logps": Expected(torch.cat(logps), LOGP, rows=rows),
    }


def run(form):
    def call(given: Inputs) -> Outputs:
        ids_NS, logps_NS = form(given.logits_NV, given.case.kappa)
        return {"ids": ids_NS, "logps": logps_NS}

    return call


def fused(logits_NV: Tensor, kappa: int) -> tuple[Tensor, Tensor]:
    top = topk_logprobs(logits_NV, kappa)
    return top.ids_NS, top.logps_NS


BENCHMARK = Benchmark(
    cases={
        "cpu": (
            Case(N=256, V=151_936, kappa=16, main=True),
            Case(N=256, V=151_936, kappa=16, dtype="bfloat16"),
            Case(N=10_000, V=265, kappa=16),
        ),
        "cuda": (
            Case(N=8192, V=151_936, kappa=16, dtype="bfloat16", main=True),
            Case(N=8192, V=151_936, kappa=32, dtype="bfloat16"),
            Case(N=8192, V=151_936, kappa=64, dtype="bfloat16"),
            *(Case(N=n, V=v, kappa=16, dtype="bfloat16") for n, v in VOCABULARIES),
        ),
        "quick": (Case(N=9, V=40, kappa=3, main=True), Case(N=2, V=1271, kappa=16, dtype="bfloat16")),
        "check": (
            Case(N=1, V=7, kappa=7),
            Case(N=41, V=1271, kappa=16, dtype="bfloat16"),
            Case(N=300, V=265, kappa=16),
            Case(N=5, V=151_936, kappa=128, dtype="float16"),
            Case(N=5, V=152_064, kappa=64, dtype="bfloat16"),
        ),
    },
    inputs=inputs,
    truth=truth,
    ceilings=lambda given: [ceiling.read(given.logits_NV), ceiling.copy(given.logits_NV)],
    providers=(
        eager("topk + logsumexp", run(eager_forms.topk_of_logits)),
        eager("log_softmax + topk", run(eager_forms.topk_of_log_softmax)),
        compiled(run(compiling(eager_forms.topk_of_logits))),
        *ours(run(fused)),
        peer(
            "flashinfer",
            run(peers.flashinfer_topk),
            "flashinfer",
            devices=("cuda",),
            note="ids and values; logsumexp is eager",
        ),
    ),
)
