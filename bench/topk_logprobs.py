"""Benchmarks of topk_logprobs and linear_topk_logprobs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bench.harness import ceiling, eager_forms
from bench.harness.accuracy import LINEAR_NORM, LOGP
from bench.harness.inputs import VOCABULARIES, head_logits, random_head, random_logits
from bench.harness.truth import checked_rows, in_chunks
from bench.harness.types import Benchmark, Case, Expected, Outputs, Provider, compiled, compiling, ours
from smopd.ops import linear_topk_logprobs, topk_logprobs


@dataclass(frozen=True)
class Inputs:
    case: Case
    given: tuple[Tensor, ...]
    """(N, V) logits, or (N, D) hidden states and (V, D) weights."""

    def logits(self, rows: Tensor) -> Tensor:
        first, *head = self.given
        return head_logits(first[rows], *head) if head else first[rows].double()


def truth(inputs: Inputs) -> dict[str, Expected]:
    """Return the true results. For a head, omit the ids: rounding decides between nearly equal tokens."""
    case = inputs.case
    rows = checked_rows(case.N, case.V, str(inputs.given[0].device))
    ids, logps = [], []
    for some in in_chunks(rows, case.V):
        logq = inputs.logits(some).log_softmax(-1)
        ids.append(logq.sort(dim=-1, descending=True, stable=True).indices[:, : case.kappa])
        logps.append(logq.gather(-1, ids[-1]))
    if case.D:
        return {"logps": Expected(torch.cat(logps), LINEAR_NORM[case.torch_dtype], rows=rows, norm=True)}
    every = torch.ones(len(rows), case.kappa, dtype=torch.bool)
    exact = Expected(torch.cat(ids), rows=rows, exact=every)
    return {"ids": exact, "logps": Expected(torch.cat(logps), LOGP, rows=rows)}


def run(form):
    def call(inputs: Inputs) -> Outputs:
        ids_NS, logps_NS = form(*inputs.given, inputs.case.kappa)
        return {"ids": ids_NS, "logps": logps_NS}

    return call


def fused(logits_NV: Tensor, kappa: int) -> tuple[Tensor, Tensor]:
    top = topk_logprobs(logits_NV, kappa)
    return top.ids_NS, top.logps_NS


def fused_linear(hidden_ND: Tensor, weight_VD: Tensor, kappa: int) -> tuple[Tensor, Tensor]:
    top = linear_topk_logprobs(hidden_ND, weight_VD, kappa)
    return top.ids_NS, top.logps_NS


def linear(hidden_ND: Tensor, weight_VD: Tensor, kappa: int) -> tuple[Tensor, Tensor]:
    return eager_forms.topk_of_logits(hidden_ND @ weight_VD.T, kappa)


BENCHMARKS = {
    "topk_logprobs": Benchmark(
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
        },
        inputs=lambda case, device: Inputs(case, (random_logits(case, device),)),
        truth=truth,
        ceiling=lambda inputs: ceiling.read(inputs.given[0]),
        providers=(
            Provider(name="topk + logsumexp", run=run(eager_forms.topk_of_logits)),
            compiled(run(compiling(eager_forms.topk_of_logits))),
            *ours(run(fused)),
        ),
    ),
    "linear_topk_logprobs": Benchmark(
        cases={
            "cpu": (
                Case(N=2048, V=151_936, D=512, kappa=16, repeats=3, main=True),
                Case(N=256, V=151_936, D=512, kappa=16, dtype="bfloat16"),
                Case(N=10_000, V=265, D=128, kappa=16),
            ),
            "cuda": (
                Case(N=8192, V=151_936, D=2048, kappa=16, dtype="bfloat16", main=True),
                Case(N=8192, V=151_936, D=1536, kappa=16, dtype="bfloat16"),
                Case(N=8192, V=151_936, D=3584, kappa=16, dtype="bfloat16"),
            ),
        },
        inputs=lambda case, device: Inputs(case, random_head(case, device)),
        truth=truth,
        ceiling=lambda inputs: ceiling.gemm(*inputs.given),
        providers=(
            Provider(name="head, topk + logsumexp", run=run(linear)),
            compiled(run(compiling(linear))),
            *ours(run(fused_linear)),
        ),
    ),
}
