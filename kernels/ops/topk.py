"""The kappa most likely tokens of each row of logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smopd.kernels import checks, dispatch
from smopd.kernels.ops.library import empty_column, operator
from smopd.kernels.types import TopK

OP = "topk_logprobs"


def topk_logprobs(
    logits_NV: Tensor, kappa: int, *, token_ids_N: Tensor | None = None, temperature: float = 1.0
) -> TopK:
    """Return the kappa most likely tokens of each row and their log-probabilities over the whole vocabulary.

    Equals

        logq_NV = (logits_NV.float() / temperature).log_softmax(-1)
        logps_NS, ids_NS = logq_NV.topk(kappa)      # ties always go to the lower id
        token_logp_N = logq_NV.gather(-1, token_ids_N[:, None])[:, 0]

    Not differentiable.

    Args:
        logits_NV: (N, V), unit stride along V.
        kappa: 0 to V.
        token_ids_N: (N,) int32 or int64 in [0, V), or None.
        temperature: above 0.
    Returns:
        TopK: ids (N, kappa) int32 by descending log-probability, logps (N, kappa), token_logp (N,) or None.
    """
    checks.check_logits(OP, logits_NV)
    checks.check_kappa(OP, kappa, logits_NV.shape[1])
    checks.check_temperature(OP, temperature)
    if token_ids_N is not None:
        checks.check_token_ids(OP, token_ids_N, ("logits_NV", logits_NV))
    ids, logps, token_logp = _topk(logits_NV.detach(), kappa, token_ids_N, float(temperature))
    return TopK(ids, logps, None if token_ids_N is None else token_logp)


@operator(
    "topk_logprobs",
    "(Tensor logits, SymInt kappa, Tensor? token_ids, float temperature)"
    " -> (Tensor ids, Tensor logps, Tensor token_logp)",
)
def _topk(
    logits: Tensor, kappa: int, token_ids: Tensor | None, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return token_logp of shape (0,) without token_ids."""
    checks.require_token_ids(OP, token_ids, logits.shape[1])
    serve = dispatch.serving("topk_logprobs", logits, kappa=kappa)
    top = serve(logits, kappa, token_ids_N=token_ids, temperature=temperature)
    return top.ids_NS, top.logps_NS, empty_column(logits, 0) if top.token_logp_N is None else top.token_logp_N


@_topk.register_fake
def fake_topk(rows: Tensor, kappa: int, token_ids: Tensor | None, *_: Any) -> tuple[Tensor, ...]:
    """Return empty results for the rows of logits or hidden states."""
    n_rows = rows.shape[0]
    ids = empty_column(rows, n_rows, kappa, dtype=torch.int32)
    return ids, empty_column(rows, n_rows, kappa), empty_column(rows, 0 if token_ids is None else n_rows)
