"""The kappa most likely tokens, from rows of logits or from a linear head without storing all its logits.

For a head, the C++ backend multiplies many hidden states by one slice of the weight at a time, so that the
logits stay in the cache. Other backends compute chunks of whole rows. The C++ backend does the same for a row
with a NaN or too few logits above -inf.

Shapes: N packed response tokens, D hidden size, V vocabulary, P a piece of it, S support entries (kappa).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smopd.kernels import checks, dispatch
from smopd.kernels.head import ROW_UNIT_CPU, logit_chunks, logits_buffer, logits_into, row_blocks
from smopd.kernels.ops.library import empty_column, operator
from smopd.kernels.types import TopK

OP, LINEAR = "topk_logprobs", "linear_topk_logprobs"
PIECE_BYTES = 8 << 20  # limit for the logits of a piece, so that they stay in the CPU's cache
PIECE_ROWS = 1024  # rows that share one read of the weight
Head = tuple[Tensor, Tensor, Tensor | None]  # hidden, weight, bias


def topk_logprobs(
    logits_NV: Tensor, kappa: int, *, token_ids_N: Tensor | None = None, temperature: float = 1.0
) -> TopK:
    """Return the kappa most likely tokens of each row and their log-probabilities over the whole vocabulary.

    The result equals

        logq_NV = (logits_NV.float() / temperature).log_softmax(-1)
        logps_NS, ids_NS = logq_NV.topk(kappa)      # ties always go to the lower id
        token_logp_N = logq_NV.gather(-1, token_ids_N[:, None])[:, 0]

    The result is not differentiable.

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
    """Return ids, logps and token_logp. Without token_ids, token_logp has shape (0,)."""
    checks.require_token_ids(OP, token_ids, logits.shape[1])
    serve = dispatch.serving("topk_logprobs", logits, kappa=kappa)
    top = serve(logits, kappa, token_ids_N=token_ids, temperature=temperature)
    return top.ids_NS, top.logps_NS, empty_column(logits, 0) if top.token_logp_N is None else top.token_logp_N


@_topk.register_fake
def fake_topk(rows: Tensor, kappa: int, token_ids: Tensor | None, *_: Any) -> tuple[Tensor, ...]:
    """Return uninitialized results for rows of logits or hidden states."""
    n_rows = rows.shape[0]
    ids = empty_column(rows, n_rows, kappa, dtype=torch.int32)
    return ids, empty_column(rows, n_rows, kappa), empty_column(rows, 0 if token_ids is None else n_rows)


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
    """Return topk_logprobs of the logits hidden @ weight.T + bias without storing all (N, V) of them at once.

    The logits have the inputs' dtype. kappa=0 returns only token_logp. The result is not differentiable.

    Args:
        hidden_ND: (N, D).
        weight_VD: (V, D) in the dtype of hidden_ND.
        kappa, token_ids_N, temperature: see topk_logprobs.
        bias_V: (V,) or None.
        chunk_bytes: upper limit for the logits stored at a time, at least one row. None: 160 MiB on a CPU,
            else 1.25 GiB. C++ stores at most 8 MiB, except for rows with a NaN or too few logits above -inf.
    """
    checks.check_linear(LINEAR, hidden_ND, weight_VD, bias_V, chunk_bytes)
    checks.check_kappa(LINEAR, kappa, weight_VD.shape[0])
    checks.check_temperature(LINEAR, temperature)
    if token_ids_N is not None:
        checks.check_token_ids(LINEAR, token_ids_N, ("hidden_ND", hidden_ND))
    head = (hidden_ND.detach(), weight_VD.detach(), None if bias_V is None else bias_V.detach())
    ids, logps, token_logp = _linear_topk(*head, kappa, token_ids_N, float(temperature), chunk_bytes)
    return TopK(ids, logps, None if token_ids_N is None else token_logp)


def _of_chunks(
    head: Head, kappa: int, token_ids_N: Tensor | None, temperature: float, chunk_bytes: int | None
) -> list[Tensor]:
    """Return ids, logps and token_logp, computed by topk_logprobs on chunks of whole rows."""
    serve = dispatch.serving("topk_logprobs", head[0], n_vocab=len(head[1]), kappa=kappa)
    parts = []
    for rows, logits_NV in logit_chunks(*head, chunk_bytes):
        tokens_N = None if token_ids_N is None else token_ids_N[rows]
        top = serve(logits_NV, kappa, token_ids_N=tokens_N, temperature=temperature)
        token_logp_N = top.logps_NS.new_empty(0) if top.token_logp_N is None else top.token_logp_N
        parts.append((top.ids_NS, top.logps_NS, token_logp_N))
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def _of_pieces(
    running: Any,
    head: Head,
    kappa: int,
    token_ids_N: Tensor | None,
    temperature: float,
    chunk_bytes: int | None,
) -> list[Tensor]:
    """Return ids, logps, token_logp and valid, computed by RunningTopK over pieces of the vocabulary."""
    hidden_ND, weight_VD, bias_V = head
    n_vocab = len(weight_VD)
    budget = min(PIECE_BYTES, chunk_bytes or PIECE_BYTES) // hidden_ND.element_size()
    blocks = row_blocks(len(hidden_ND), min(PIECE_ROWS, budget // running.step), ROW_UNIT_CPU)
    most = max(rows.stop - rows.start for rows in blocks)
    width = max(budget // max(most, 1) // running.step, 1) * running.step
    buffer_NP = logits_buffer(most, min(width, n_vocab), hidden_ND)
    parts = []
    for rows in blocks:
        n_rows, tokens_N = rows.stop - rows.start, None if token_ids_N is None else token_ids_N[rows]
        top = running(hidden_ND, n_rows, kappa, tokens_N, temperature)
        for first in range(0, n_vocab, width):
            piece = slice(first, min(first + width, n_vocab))
            piece_NP = buffer_NP[:n_rows, : piece.stop - first]
            bias_P = None if bias_V is None else bias_V[piece]
            logits_into(piece_NP, hidden_ND[rows], weight_VD[piece], bias_P)
            top.add(piece_NP, first)
        parts.append(top.result())
    return [torch.cat(column) for column in zip(*parts, strict=True)]


@operator(
    "linear_topk_logprobs",
    "(Tensor hidden, Tensor weight, Tensor? bias, SymInt kappa, Tensor? token_ids, float temperature,"
    " SymInt? chunk_bytes) -> (Tensor ids, Tensor logps, Tensor token_logp)",
)
def _linear_topk(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, kappa: int, token_ids: Tensor | None, *options: Any
) -> tuple[Tensor, ...]:
    checks.require_token_ids(LINEAR, token_ids, weight.shape[0])
    running = dispatch.running_topk(hidden, n_vocab=weight.shape[0], kappa=kappa)
    with torch.autocast(hidden.device.type, enabled=False):
        if running is None:
            return tuple(_of_chunks((hidden, weight, bias), kappa, token_ids, *options))
        *columns, valid_N = _of_pieces(running, (hidden, weight, bias), kappa, token_ids, *options)
        if not valid_N.all():
            (rows,) = (~valid_N).nonzero(as_tuple=True)
            tokens = None if token_ids is None else token_ids[rows]
            values = _of_chunks((hidden[rows], weight, bias), kappa, tokens, *options)
            for column, value in zip(columns, values, strict=True):
                if column.shape[0]:
                    column[rows] = value
    return tuple(columns)


@_linear_topk.register_fake
def _(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, kappa: int, token_ids: Tensor | None, *_: Any
) -> tuple[Tensor, ...]:
    return fake_topk(hidden, kappa, token_ids)
