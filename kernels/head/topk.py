"""linear_topk_logprobs: the most likely tokens of a linear head, whose logits are never held for all tokens.

    pieces  (where the backend has a running top-kappa: C++ on a CPU) a piece of the vocabulary at a time for
            many rows, so that the logits stay in the cache and the weight is read once for all those rows.
    rows    all logits of a chunk of rows. Rows that the pieces cannot serve are done again so.
    shards  (tp_group) the same with this rank's part of the vocabulary.

Under tp_group each rank takes the top-kappa of its own logits. A row's best logit and that entry's local
log-probability tell the shard's log-sum-exp as (max, log of the sum); kappa ids and logits a rank are
gathered and merged in rank order, so ties go to the lower id and every rank has the same bits.

Shapes: N tokens, D hidden, V vocabulary (this rank's part), P a piece of it, S support entries (kappa),
R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from smopd.kernels import checks
from smopd.kernels.head.chunks import ROW_UNIT_CPU, chunk_budget, row_blocks, steps
from smopd.kernels.head.gemm import logits_into
from smopd.kernels.head.shards import Shard, shard_of
from smopd.kernels.head.tiles import places_in
from smopd.kernels.types import TopK, compute_dtype

PIECE_BYTES = 8 << 20  # a buffer that stays in a CPU's cache
PIECE_ROWS = 1024  # that share one read of the weight


class RunningTopK(Protocol):
    """topk_logprobs of rows whose logits come a piece of the vocabulary at a time, in order."""

    step: int  # the length of every piece but the last is a multiple

    def __init__(
        self, like: Tensor, n_rows: int, kappa: int, token_ids_N: Tensor | None, temperature: float
    ): ...

    def add(self, logits_NP: Tensor, first: int) -> None: ...

    def result(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """ids, logps, token_logp, (0,) without ids, and which rows they are right for, (N,) bool."""
        ...


def linear_topk_logprobs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    kappa: int,
    *,
    token_ids_N: Tensor | None = None,
    bias_V: Tensor | None = None,
    temperature: float = 1.0,
    tp_group: Any = None,
    shard_sizes: Sequence[int] | None = None,
    chunk_bytes: int | None = None,
    topk_logprobs: Callable[..., TopK],
    running: type[RunningTopK] | None = None,
) -> TopK:
    """topk_logprobs, running: the backend's; the first serves a chunk's logits."""
    op = "linear_topk_logprobs"
    shard = shard_of(op, weight_VD, tp_group, shard_sizes)
    checks.check_kappa(op, kappa, shard.n_vocab)
    checks.require_token_ids(op, token_ids_N, shard.n_vocab)
    head = (weight_VD, bias_V)
    options: dict[str, Any] = {"temperature": temperature, "chunk_bytes": chunk_bytes}
    with torch.no_grad(), torch.autocast(hidden_ND.device.type, enabled=False):
        if tp_group is not None:
            local = _by_rows(hidden_ND, *head, kappa, token_ids_N, shard, topk_logprobs, **options)
            ids_NS, logps_NS, token_N, logits_NS = local
            assert logits_NS is not None  # under a group
            return _over_shards(shard, kappa, ids_NS, logps_NS, token_N, logits_NS, temperature)
        if running is None:
            return TopK(*_by_rows(hidden_ND, *head, kappa, token_ids_N, shard, topk_logprobs, **options)[:3])
        *columns, right_N = _by_pieces(hidden_ND, *head, kappa, token_ids_N, running, **options)
        if not right_N.all():
            (again_K,) = (~right_N).nonzero(as_tuple=True)
            tokens_K = None if token_ids_N is None else token_ids_N[again_K]
            rest = _by_rows(hidden_ND[again_K], *head, kappa, tokens_K, shard, topk_logprobs, **options)
            for column, values_K in zip(columns, rest, strict=False):
                if values_K is not None:
                    column[again_K] = values_K
        ids_NS, logps_NS, token_N = columns
        return TopK(ids_NS, logps_NS, None if token_ids_N is None else token_N)


def _by_pieces(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    kappa: int,
    token_ids_N: Tensor | None,
    running: type[RunningTopK],
    *,
    temperature: float,
    chunk_bytes: int | None,
) -> list[Tensor]:
    """What `running` results in, for all tokens."""
    n_rows, n_vocab, step = len(hidden_ND), len(weight_VD), running.step
    budget = min(PIECE_BYTES, chunk_bytes or PIECE_BYTES) // hidden_ND.element_size()
    blocks = list(steps(n_rows, max(1, min(PIECE_ROWS, budget // step)), ROW_UNIT_CPU))
    most = max((stop - start for start, stop in blocks), default=1)
    width = min(max(budget // most // step, 1), -(-n_vocab // step)) * step
    buffer_NP = hidden_ND.new_empty(most, width)
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
    if not parts:
        parts.append(running(hidden_ND, 0, kappa, token_ids_N, temperature).result())
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def _by_rows(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    kappa: int,
    token_ids_N: Tensor | None,
    shard: Shard,
    topk_logprobs: Callable[..., TopK],
    *,
    temperature: float,
    chunk_bytes: int | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """ids, logps, token_logp as in TopK and, under a process group, the ids' logits.

    Under a group ids are places in the shard, at most all of it; a token's column holds its logit, 0 where
    another rank has it.
    """
    alone = shard.group is None
    n_rows, dtype = hidden_ND.shape[0], compute_dtype(hidden_ND.dtype)
    n_kept = kappa if alone else min(max(kappa, 1), weight_VD.shape[0])
    ids_NS = hidden_ND.new_empty(n_rows, n_kept, dtype=torch.int32)
    logps_NS = hidden_ND.new_empty(n_rows, n_kept, dtype=dtype)
    token_N = None if token_ids_N is None else hidden_ND.new_empty(n_rows, dtype=dtype)
    logits_NS = None if alone else torch.empty_like(logps_NS)
    budget = chunk_budget(hidden_ND, chunk_bytes, recompute=False)
    blocks, buffer_NV = row_blocks(n_rows, hidden_ND, weight_VD.shape[0], budget)
    for start, stop in blocks:
        chunk_NV, tokens = buffer_NV[: stop - start], None
        logits_into(chunk_NV, hidden_ND[start:stop], weight_VD, bias_V)
        if alone and token_ids_N is not None:
            tokens = token_ids_N[start:stop]
        top = topk_logprobs(chunk_NV, n_kept, token_ids_N=tokens, temperature=temperature)
        ids_NS[start:stop], logps_NS[start:stop] = top.ids_NS, top.logps_NS
        if token_N is not None and top.token_logp_N is not None:
            token_N[start:stop] = top.token_logp_N
        if logits_NS is not None:
            logits_NS[start:stop] = chunk_NV.gather(1, top.ids_NS.long())
        if not alone and token_N is not None and token_ids_N is not None:
            inside_N, places_N = places_in(token_ids_N[start:stop].long(), shard.start, len(weight_VD))
            places_N1 = places_N[:, None].clamp(max=len(weight_VD) - 1)
            token_N[start:stop] = chunk_NV.gather(1, places_N1)[:, 0].to(dtype).masked_fill(~inside_N, 0.0)
    return ids_NS, logps_NS, token_N, logits_NS


def _over_shards(
    shard: Shard,
    kappa: int,
    ids_NS: Tensor,
    logps_NS: Tensor,
    token_N: Tensor | None,
    logits_NS: Tensor,
    temperature: float,
) -> TopK:
    """Of what _by_rows tells of this rank's logits."""
    widest = min(max(kappa, 1), max(shard.sizes))
    pad = (0, widest - ids_NS.shape[1])
    scaled_NS = torch.nn.functional.pad(logits_NS / temperature, pad, value=-torch.inf)
    columns = [scaled_NS, -logps_NS[:, :1]]
    if token_N is not None:
        columns.append(token_N[:, None] / temperature)
    gathered_RNC = shard.gather(torch.cat(columns, 1))
    ids_RNS = shard.gather(torch.nn.functional.pad(ids_NS + shard.start, pad))

    peak_RN = gathered_RNC[..., 0]
    peak_N = peak_RN.amax(0)
    base_N = torch.where(peak_N == -torch.inf, 0.0, peak_N)
    total_RN = torch.where(peak_RN == -torch.inf, 0.0, (gathered_RNC[..., widest] + peak_RN - base_N).exp())
    total_N = torch.where(peak_N == torch.inf, 1.0, total_RN.sum(0))
    log_total_N1 = total_N.log()[:, None]

    # Without the padding, which would win against -inf of a later rank.
    kept = [rank * widest + i for rank, size in enumerate(shard.sizes) for i in range(min(widest, size))]
    scaled_NP = gathered_RNC[..., :widest].transpose(0, 1).flatten(1)[:, kept]
    best_NP, order_NP = scaled_NP.sort(dim=-1, descending=True, stable=True)
    top_ids_NS = ids_RNS.transpose(0, 1).flatten(1)[:, kept].gather(1, order_NP[:, :kappa])
    top_logps_NS = best_NP[:, :kappa] - base_N[:, None] - log_total_N1
    if token_N is None:
        return TopK(top_ids_NS, top_logps_NS)
    token_N = gathered_RNC[..., -1].sum(0)  # one summand that is not 0
    return TopK(top_ids_NS, top_logps_NS, token_N - base_N - log_total_N1[:, 0])
