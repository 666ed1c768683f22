"""Top-kappa, sampling and mixture in plain PyTorch.

Shapes: N tokens, V vocabulary, M teachers, S support entries (kappa), P pooled candidates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from smopd.kernels.types import Mixture, TopK, compute_dtype

ROW_CHUNK_BYTES = 64 << 20  # size of a chunk's fp32 logits
ROW_CHUNK_BYTES_CPU = 4 << 20  # fits into the cache, and malloc reuses the memory


def row_chunks(rows: Tensor) -> Iterator[slice]:
    """Yield consecutive blocks of rows, at least one block."""
    limit = ROW_CHUNK_BYTES_CPU if rows.device.type == "cpu" else ROW_CHUNK_BYTES
    n_rows, width = rows.shape[0], max(1, math.prod(rows.shape[1:]))
    step = max(1, limit // (width * compute_dtype(rows.dtype).itemsize))
    for start in range(0, max(n_rows, 1), step):
        yield slice(start, min(start + step, n_rows))


def widen(logits_NV: Tensor, temperature: float = 1.0) -> Tensor:
    """Return logits / temperature in the compute dtype. If that changes nothing, return the input itself."""
    wide_NV = logits_NV.to(compute_dtype(logits_NV.dtype))
    return wide_NV if temperature == 1.0 else wide_NV / temperature


def topk_logprobs(
    logits_NV: Tensor, kappa: int, *, token_ids_N: Tensor | None = None, temperature: float = 1.0
) -> TopK:
    ids, logps, token_logps = [], [], []
    for chunk in row_chunks(logits_NV):
        scaled_NV = widen(logits_NV[chunk].detach(), temperature)
        lse_N1 = scaled_NV.logsumexp(-1, keepdim=True)
        values_NS, ids_NS = _topk_lowest_ids(scaled_NV, kappa)
        ids.append(ids_NS.to(torch.int32))
        logps.append(values_NS - lse_N1)
        if token_ids_N is not None:
            picked_N1 = scaled_NV.gather(-1, token_ids_N[chunk, None].long())
            token_logps.append((picked_N1 - lse_N1)[:, 0])
    return TopK(torch.cat(ids), torch.cat(logps), torch.cat(token_logps) if token_logps else None)


def _topk_lowest_ids(values_NV: Tensor, kappa: int) -> tuple[Tensor, Tensor]:
    """Return the values and ids of a sorted torch.topk in which ties go to the lower id."""
    n_vocab = values_NV.shape[-1]
    top_NS, ids_NS = values_NV.topk(min(kappa + 1, n_vocab), dim=-1)
    if 0 < kappa < n_vocab:
        # Ids can be wrong only if entries kappa and kappa + 1 are equal. nonzero() would synchronize a GPU.
        tied_N = top_NS[:, kappa - 1] == top_NS[:, kappa]
        rows = tied_N.nonzero()[:, 0] if values_NV.device.type == "cpu" else slice(None)
        some_NV, least_N1 = values_NV[rows], top_NS[rows, kappa - 1 : kappa]
        rank_V = torch.arange(n_vocab, 0, -1, dtype=torch.int32, device=values_NV.device)
        rank_NV = torch.where(some_NV == least_N1, rank_V, 0)
        lowest_NS = torch.where(some_NV > least_N1, rank_V + n_vocab, rank_NV).topk(kappa, dim=-1).indices
        ids_NS[rows, :kappa] = torch.where(tied_N[rows, None], lowest_NS, ids_NS[rows, :kappa])
    ids_NS = ids_NS[:, :kappa].sort(dim=-1).values
    top_NS, order_NS = values_NV.gather(-1, ids_NS).sort(dim=-1, descending=True, stable=True)
    return top_NS, ids_NS.gather(-1, order_NS)


def draw(logits_RV: Tensor, temperature: float, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
    """Sample a token per row. Return (R,) int64 tokens and (R,) fp32 log-probabilities at `temperature`.

    uniform_R: (R,) float64 in [0, 1). A row's token is the lowest id whose cumulative probability exceeds it.
    """
    logps_RV = (logits_RV.float() / temperature).log_softmax(-1)
    cumulative_RV = logps_RV.double().exp().cumsum(-1)
    total_R = cumulative_RV[:, -1]
    aim_R = torch.minimum(uniform_R * total_R, total_R.nextafter(torch.zeros_like(total_R)))
    token_R = torch.searchsorted(cumulative_RV, aim_R[:, None], right=True)[:, 0]
    token_R = token_R.clamp(max=logits_RV.shape[-1] - 1)  # in a row with NaN, no entry exceeds the aim
    return token_R, logps_RV.gather(-1, token_R[:, None])[:, 0]


def teacher_mixture(
    ids_NMS: Tensor, logps_NMS: Tensor, log_alpha: Tensor, kappa: int, *, merge: bool = False
) -> Mixture:
    n_rows, n_teachers, n_support = ids_NMS.shape
    dtype = compute_dtype(logps_NMS.dtype)
    log_alpha_NM1 = log_alpha.detach().to(dtype).expand(n_rows, n_teachers)[..., None]
    pool_NP = (logps_NMS.detach().to(dtype) + log_alpha_NM1).reshape(n_rows, n_teachers * n_support)
    ids_NP = ids_NMS.reshape(n_rows, n_teachers * n_support).long().masked_fill(pool_NP == -torch.inf, 0)
    ids_NP = ids_NP.where(ids_NP == ids_NP.int(), -1)  # an id above int32 is in no vocabulary
    if merge:
        ids_NP, order_NP = ids_NP.sort(dim=-1, stable=True)
        ids_NP, pool_NP = merge_sorted(ids_NP, pool_NP.gather(-1, order_NP))
    return _best(ids_NP, pool_NP, kappa)


def _best(ids_NP: Tensor, logps_NP: Tensor, kappa: int) -> Mixture:
    """Return the kappa best entries. Ties go to the earlier entry. Missing entries have id 0, logp -inf."""
    pad = torch.nn.functional.pad
    logps_NP, order_NP = logps_NP.sort(dim=-1, descending=True, stable=True)
    ids_NP = ids_NP.gather(-1, order_NP).masked_fill(logps_NP == -torch.inf, 0)
    missing = (0, kappa - logps_NP.shape[-1])  # a negative padding truncates
    logps_NS = pad(logps_NP, missing, value=-torch.inf)
    return Mixture(pad(ids_NP, missing).to(torch.int32), logps_NS, logps_NS.exp().sum(-1))


def merge_sorted(ids_NP: Tensor, logps_NP: Tensor) -> tuple[Tensor, Tensor]:
    """Merge runs of equal, ascending ids by logsumexp, run i into slot i. Other slots: id 0, logp -inf."""
    segment_NP = torch.zeros_like(ids_NP)
    segment_NP[:, 1:] = (ids_NP[:, 1:] != ids_NP[:, :-1]).cumsum(-1)
    empty_NP = torch.full_like(logps_NP, -torch.inf)
    peak_NP = empty_NP.scatter_reduce(-1, segment_NP, logps_NP, "amax")
    shift_NP = torch.where(peak_NP == -torch.inf, 0.0, peak_NP)
    mass_NP = _run_sums((logps_NP - shift_NP.gather(-1, segment_NP)).exp(), segment_NP)
    merged_ids_NP = torch.zeros_like(ids_NP).scatter(-1, segment_NP, ids_NP)
    return merged_ids_NP, mass_NP.log() + shift_NP


def _run_sums(values_NP: Tensor, segment_NP: Tensor) -> Tensor:
    """Return the sum of each segment at the index of its number, and 0 elsewhere. The numbers ascend from 0.

    The sums are built by doubling, in a fixed order. scatter_add on a GPU has no fixed order.
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
    places_NP = torch.where(last_NP, segment_NP, n_places)  # one extra place is for the other values
    sums_NP = torch.nn.functional.pad(torch.zeros_like(values_NP), (0, 1)).scatter(-1, places_NP, values_NP)
    return sums_NP[:, :-1]
