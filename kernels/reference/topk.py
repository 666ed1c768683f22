"""Top-kappa, mixture and product in plain PyTorch.

Shapes: N tokens, V vocabulary, M teachers, S support entries (kappa), P pooled candidates.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from smopd.kernels.types import Mixture, ProductOptions, TopK, compute_dtype

ROW_CHUNK_BYTES = 64 << 20  # fp32 logits per chunk
ROW_CHUNK_BYTES_CPU = 4 << 20  # fits the cache, and malloc reuses the memory
_ID_BITS = 32


def row_chunks(logits_NV: Tensor) -> Iterator[slice]:
    """Yield consecutive blocks of rows, at least one."""
    limit = ROW_CHUNK_BYTES_CPU if logits_NV.device.type == "cpu" else ROW_CHUNK_BYTES
    n_rows, n_vocab = logits_NV.shape
    step = max(1, limit // (n_vocab * compute_dtype(logits_NV.dtype).itemsize))
    for start in range(0, max(n_rows, 1), step):
        yield slice(start, min(start + step, n_rows))


def widen(logits_NV: Tensor, temperature: float = 1.0) -> Tensor:
    """Return logits / temperature in the compute dtype; the input itself if it already is that."""
    wide_NV = logits_NV.to(compute_dtype(logits_NV.dtype))
    return wide_NV if temperature == 1.0 else wide_NV / temperature


def topk_logprobs(
    logits_NV: Tensor, kappa: int, *, token_ids_N: Tensor | None = None, temperature: float = 1.0
) -> TopK:
    n_rows = logits_NV.shape[0]
    dtype = compute_dtype(logits_NV.dtype)
    ids_NS = torch.empty(n_rows, kappa, dtype=torch.int32, device=logits_NV.device)
    logps_NS = torch.empty(n_rows, kappa, dtype=dtype, device=logits_NV.device)
    token_logp_N = None if token_ids_N is None else torch.empty(n_rows, dtype=dtype, device=logits_NV.device)
    for chunk in row_chunks(logits_NV):
        scaled_NV = widen(logits_NV[chunk].detach(), temperature)
        lse_N1 = scaled_NV.logsumexp(-1, keepdim=True)
        values_NS, ids = _topk_lowest_ids(scaled_NV, kappa)
        ids_NS[chunk] = ids
        logps_NS[chunk] = values_NS - lse_N1
        if token_ids_N is not None and token_logp_N is not None:
            picked_N1 = scaled_NV.gather(-1, token_ids_N[chunk, None].long())
            token_logp_N[chunk] = (picked_N1 - lse_N1)[:, 0]
    return TopK(ids_NS, logps_NS, token_logp_N)


def _topk_lowest_ids(values_NV: Tensor, kappa: int) -> tuple[Tensor, Tensor]:
    """Return the sorted torch.topk with ties to the lower id."""
    n_vocab = values_NV.shape[-1]
    top_NS, ids_NS = values_NV.topk(min(kappa + 1, n_vocab), dim=-1)
    if kappa == 0:
        return top_NS[:, :0], ids_NS[:, :0]
    if kappa < n_vocab:
        # Ids can be wrong only if entry kappa + 1 equals entry kappa.
        tied_N = top_NS[:, kappa - 1] == top_NS[:, kappa]
        top_NS, ids_NS = top_NS[:, :kappa], ids_NS[:, :kappa]
        if values_NV.device.type == "cpu":
            rows = tied_N.nonzero()[:, 0]
            if rows.numel() > 0:
                ids_NS = ids_NS.index_copy(0, rows, _lowest_ids_above(values_NV[rows], top_NS[rows]))
        else:  # all rows, to avoid a synchronization
            ids_NS = torch.where(tied_N[:, None], _lowest_ids_above(values_NV, top_NS), ids_NS)
    # Sort the ids within each run of equal values.
    run_NS = torch.zeros_like(ids_NS)
    run_NS[:, 1:] = (top_NS[:, 1:] != top_NS[:, :-1]).cumsum(-1)
    keys_NS = ((run_NS << _ID_BITS) | ids_NS).sort(-1).values
    return top_NS, keys_NS & ((1 << _ID_BITS) - 1)


def _lowest_ids_above(values_NV: Tensor, top_NS: Tensor) -> Tensor:
    """Return the ids of all entries above the smallest of top_NS, and the lowest of those equal to it."""
    n_vocab = values_NV.shape[-1]
    threshold_N1 = top_NS[:, -1:]
    rank_V = torch.arange(n_vocab, 0, -1, dtype=torch.int32, device=values_NV.device)
    rank_NV = torch.where(values_NV == threshold_N1, rank_V, 0)
    rank_NV = torch.where(values_NV > threshold_N1, rank_V + n_vocab, rank_NV)
    ids_NS = rank_NV.topk(top_NS.shape[-1], dim=-1).indices
    # Ids ascend within each of the two classes, so a stable sort by value keeps ties in order.
    order_NS = values_NV.gather(-1, ids_NS).sort(dim=-1, descending=True, stable=True).indices
    return ids_NS.gather(-1, order_NS)


def teacher_mixture(
    ids_NMS: Tensor, logps_NMS: Tensor, log_alpha: Tensor, kappa: int, *, merge: bool = False
) -> Mixture:
    n_rows, n_teachers, n_support = ids_NMS.shape
    dtype = compute_dtype(logps_NMS.dtype)
    log_alpha_NM1 = log_alpha.detach().to(dtype).expand(n_rows, n_teachers)[..., None]
    pool_NP = (logps_NMS.detach().to(dtype) + log_alpha_NM1).reshape(n_rows, n_teachers * n_support)
    ids_NP = ids_NMS.reshape(n_rows, n_teachers * n_support).long().masked_fill(pool_NP == -torch.inf, 0)
    if merge:
        ids_NP, order_NP = ids_NP.sort(dim=-1, stable=True)
        ids_NP, pool_NP = merge_sorted(ids_NP, pool_NP.gather(-1, order_NP))
    kept = min(kappa, n_teachers * n_support)
    # Stable: ties go to the lower id if merged, else to the lower teacher and then to its order.
    pool_NP, order_NP = pool_NP.sort(dim=-1, descending=True, stable=True)
    ids_NS = ids_NP.gather(-1, order_NP[:, :kept]).masked_fill(pool_NP[:, :kept] == -torch.inf, 0)
    pad = (0, kappa - kept)
    ids_NS = torch.nn.functional.pad(ids_NS, pad).to(torch.int32)
    logps_NS = torch.nn.functional.pad(pool_NP[:, :kept], pad, value=-torch.inf)
    return Mixture(ids_NS, logps_NS, logps_NS.exp().sum(-1))


def teacher_product(
    ids_NMS: Tensor, logps_NMS: Tensor, weights: Tensor, kappa: int, options: ProductOptions
) -> Mixture:
    n_rows, n_models, n_support = ids_NMS.shape
    dtype = compute_dtype(logps_NMS.dtype)
    others = [m for m in range(n_models) if m != options.reference]
    ids_NMS, logps_NMS = _joined(ids_NMS, logps_NMS.detach().to(dtype))
    ids_NS, base_NS = ids_NMS[:, options.reference].contiguous(), logps_NMS[:, options.reference]
    weights_NM = weights.detach().to(dtype).expand(n_rows, len(others))
    given_NS, total_NS = base_NS != -torch.inf, torch.zeros_like(base_NS)
    raises_NS, highest_NS = torch.zeros_like(base_NS), torch.full_like(base_NS, -torch.inf)
    for weight_N, m in zip(weights_NM.unbind(1), others, strict=True):
        at_NS = torch.searchsorted(ids_NMS[:, m].contiguous(), ids_NS).clamp(max=n_support - 1)
        logps_NS = logps_NMS[:, m].gather(-1, at_NS)
        given_NS = given_NS & (ids_NMS[:, m].gather(-1, at_NS) == ids_NS) & (logps_NS != -torch.inf)
        change_NS = weight_N[:, None] * (logps_NS - base_NS).clamp(-options.clip, options.clip)
        total_NS = total_NS + change_NS
        raises_NS = raises_NS + change_NS.clamp(min=0)
        highest_NS = torch.maximum(highest_NS, change_NS)
    total_NS = torch.where(highest_NS > options.keep_raised, raises_NS, total_NS)
    logq_NS = (base_NS + total_NS).masked_fill(~given_NS, -torch.inf)
    logq_NS = (logq_NS - logq_NS.logsumexp(-1, keepdim=True)).masked_fill(~given_NS, -torch.inf)
    # Stable, and ids ascend: ties go to the lower id.
    logq_NS, order_NS = logq_NS.sort(dim=-1, descending=True, stable=True)
    kept, pad = min(kappa, n_support), (0, max(0, kappa - n_support))
    ids_NS = ids_NS.gather(-1, order_NS).masked_fill(logq_NS == -torch.inf, 0)[:, :kept]
    logq_NS = torch.nn.functional.pad(logq_NS[:, :kept], pad, value=-torch.inf)
    ids_NS = torch.nn.functional.pad(ids_NS, pad).to(torch.int32)
    return Mixture(ids_NS, logq_NS, logq_NS.exp().sum(-1))


def _joined(ids_NMS: Tensor, logps_NMS: Tensor) -> tuple[Tensor, Tensor]:
    """Sort each model's ids and join repeats by logsumexp; fill the rest with the largest int64 and -inf."""
    shape, none = ids_NMS.shape, torch.iinfo(torch.int64).max
    empty_NMS = logps_NMS == -torch.inf
    ids_PS, order_PS = ids_NMS.long().masked_fill(empty_NMS, none).flatten(0, 1).sort(dim=-1, stable=True)
    ids_PS, logps_PS = merge_sorted(ids_PS, logps_NMS.flatten(0, 1).gather(-1, order_PS))
    return ids_PS.masked_fill(logps_PS == -torch.inf, none).view(shape), logps_PS.view(shape)


def merge_sorted(ids_NP: Tensor, logps_NP: Tensor) -> tuple[Tensor, Tensor]:
    """Join runs of equal ids (ascending) by logsumexp. Joined entries come first; the rest is 0, -inf."""
    segment_NP = torch.zeros_like(ids_NP)
    segment_NP[:, 1:] = (ids_NP[:, 1:] != ids_NP[:, :-1]).cumsum(-1)
    empty_NP = torch.full_like(logps_NP, -torch.inf)
    peak_NP = empty_NP.scatter_reduce(-1, segment_NP, logps_NP, "amax")
    shift_NP = torch.where(peak_NP == -torch.inf, 0.0, peak_NP)
    mass_NP = _run_sums((logps_NP - shift_NP.gather(-1, segment_NP)).exp(), segment_NP)
    merged_ids_NP = torch.zeros_like(ids_NP).scatter(-1, segment_NP, ids_NP)
    return merged_ids_NP, mass_NP.log() + shift_NP


def _run_sums(values_NP: Tensor, segment_NP: Tensor) -> Tensor:
    """Sum the values of each segment (ascending from 0) at its index; 0 at the other indices.

    By doubling, so that the order of additions is fixed: scatter_add on a GPU has none.
    """
    n_places = values_NP.shape[-1]
    distance = 1
    while distance < n_places:
        same_NP = segment_NP[:, distance:] == segment_NP[:, :-distance]
        before_NP = torch.where(same_NP, values_NP[:, :-distance], 0.0)
        values_NP = torch.cat([values_NP[:, :distance], values_NP[:, distance:] + before_NP], -1)
        distance *= 2
    last_NP = torch.ones_like(segment_NP, dtype=torch.bool)
    last_NP[:, :-1] = segment_NP[:, 1:] != segment_NP[:, :-1]
    places_NP = torch.where(last_NP, segment_NP, n_places)  # one extra place takes the other values
    sums_NP = torch.nn.functional.pad(torch.zeros_like(values_NP), (0, 1)).scatter(-1, places_NP, values_NP)
    return sums_NP[:, :-1]
