"""The kappa most likely tokens of a linear head's rows, without its logits.

Where the backend has a running top-kappa (C++ on a CPU) a piece of the vocabulary meets many rows at a time
and stays in the cache. Elsewhere, and for rows that the pieces cannot serve, chunks of whole rows.

Shapes: N packed response tokens, D hidden, V vocabulary, P a piece of it, S support entries (kappa).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from smopd.kernels import checks, dispatch
from smopd.kernels.head.chunks import ROW_UNIT, ROW_UNIT_CPU, row_blocks, rows_per_chunk
from smopd.kernels.head.gemm import logits_buffer, logits_into
from smopd.kernels.ops.library import empty_column, operator
from smopd.kernels.types import TopK

OP = "linear_topk_logprobs"
PIECE_BYTES = 8 << 20  # a buffer that stays in a CPU's cache
PIECE_ROWS = 1024  # that share one read of the weight
Columns = tuple[Tensor, Tensor, Tensor]  # ids (N, S), logps (N, S), token_logp (N,), or (0,) without tokens


def linear_topk_logprobs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    kappa: int,
    *,
    token_ids_N: Tensor | None = None,
    bias_V: Tensor | None = None,
    temperature: float = 1.0,
    chunk_bytes: int | None = None,
) -> TopK:
    """topk_logprobs of a linear head's logits, hidden @ weight.T + bias, without ever holding (N, V).

    Logits are made in the inputs' dtype, as the head itself would make them. kappa=0 gives the tokens'
    log-probabilities alone. Not differentiable.

    Args:
        hidden_ND: (N, D).
        weight_VD: (V, D), hidden's dtype.
        kappa, token_ids_N, temperature: as in topk_logprobs.
        bias_V: (V,) or None.
        chunk_bytes: bound of the logits held at a time, in their own dtype (one row is always allowed). None:
            on a CPU 8 MiB where the C++ backend serves, else 160 MiB; elsewhere 1.25 GiB.
    Returns:
        TopK, as topk_logprobs.
    Raises:
        TypeError, ValueError: an argument is not as above.
    """
    checks.check_linear(OP, hidden_ND, weight_VD, bias_V, chunk_bytes)
    checks.check_kappa(OP, kappa, weight_VD.shape[0])
    checks.check_temperature(OP, temperature)
    if token_ids_N is not None:
        checks.check_token_ids(OP, token_ids_N, ("hidden_ND", hidden_ND))
    head = (hidden_ND.detach(), weight_VD.detach(), None if bias_V is None else bias_V.detach())
    ids, logps, token_logp = _linear_topk(*head, kappa, token_ids_N, float(temperature), chunk_bytes)
    return TopK(ids, logps, None if token_ids_N is None else token_logp)


class _WholeRows:
    """cpp.RunningTopK's methods by a backend's topk_logprobs, whose only piece is the vocabulary."""

    def __init__(self, serve: Callable[..., TopK], *arguments: Any):
        _, _, self.kappa, self.token_ids_N, self.temperature = arguments
        self.serve = serve

    def add(self, logits_NP: Tensor, first: int) -> None:
        options = {"token_ids_N": self.token_ids_N, "temperature": self.temperature}
        self.top = self.serve(logits_NP, self.kappa, **options)

    def result(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ids_NS, logps_NS, token_logp_N = self.top.ids_NS, self.top.logps_NS, self.top.token_logp_N
        right_N = torch.ones(len(ids_NS), dtype=torch.bool, device=ids_NS.device)
        return ids_NS, logps_NS, logps_NS.new_empty(0) if token_logp_N is None else token_logp_N, right_N


def _topk(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    kappa: int,
    token_ids_N: Tensor | None,
    temperature: float,
    chunk_bytes: int | None,
    running: Any,
) -> list[Tensor]:
    """Columns, and which rows they are right for. running: a backend's RunningTopK; None: whole rows."""
    n_rows, n_vocab, width = len(hidden_ND), len(weight_VD), len(weight_VD)
    if running is None:
        running = partial(
            _WholeRows, dispatch.serving("topk_logprobs", hidden_ND, n_vocab=n_vocab, kappa=kappa)
        )
        unit = ROW_UNIT_CPU if hidden_ND.device.type == "cpu" else ROW_UNIT
        blocks = row_blocks(n_rows, rows_per_chunk(hidden_ND, n_vocab, chunk_bytes), unit)
    else:
        budget = min(PIECE_BYTES, chunk_bytes or PIECE_BYTES) // hidden_ND.element_size()
        blocks = row_blocks(n_rows, min(PIECE_ROWS, budget // running.step), ROW_UNIT_CPU)
        most = max(stop - start for start, stop in blocks)
        width = max(budget // max(most, 1) // running.step, 1) * running.step
    buffer_NP = logits_buffer(max(stop - start for start, stop in blocks), min(width, n_vocab), hidden_ND)
    parts = []
    for start, stop in blocks:
        tokens_N = None if token_ids_N is None else token_ids_N[start:stop]
        top = running(hidden_ND, stop - start, kappa, tokens_N, temperature)
        for first in range(0, n_vocab, width):
            last = min(first + width, n_vocab)
            piece_NP = buffer_NP[: stop - start, : last - first]
            bias_P = None if bias_V is None else bias_V[first:last]
            logits_into(piece_NP, hidden_ND[start:stop], weight_VD[first:last], bias_P)
            top.add(piece_NP, first)
        parts.append(top.result())
    return [torch.cat(column) for column in zip(*parts, strict=True)]


# The operator. It has no gradient.


@operator(
    "linear_topk_logprobs",
    "(Tensor hidden, Tensor weight, Tensor? bias, SymInt kappa, Tensor? token_ids, float temperature,"
    " SymInt? chunk_bytes) -> (Tensor ids, Tensor logps, Tensor token_logp)",
)
def _linear_topk(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    kappa: int,
    token_ids: Tensor | None,
    temperature: float,
    chunk_bytes: int | None,
) -> Columns:
    checks.require_token_ids(OP, token_ids, weight.shape[0])
    running = dispatch.running_topk(hidden, n_vocab=weight.shape[0], kappa=kappa)
    options = (temperature, chunk_bytes)
    with torch.autocast(hidden.device.type, enabled=False):
        *columns, right_N = _topk(hidden, weight, bias, kappa, token_ids, *options, running)
        if running is not None and not right_N.all():
            (again,) = (~right_N).nonzero(as_tuple=True)
            tokens = None if token_ids is None else token_ids[again]
            *values, _ = _topk(hidden[again], weight, bias, kappa, tokens, *options, None)
            for column, value in zip(columns, values, strict=True):
                if column.shape[0]:
                    column[again] = value
    ids, logps, token_logp = columns
    return ids, logps, token_logp


@_linear_topk.register_fake
def _(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, kappa: int, token_ids: Tensor | None, *_: Any
) -> Columns:
    n_rows = hidden.shape[0]
    ids = empty_column(hidden, n_rows, kappa, dtype=torch.int32)
    return ids, empty_column(hidden, n_rows, kappa), empty_column(hidden, 0 if token_ids is None else n_rows)
