"""Top-kappa, mixture, product and forward KL in plain PyTorch: their definition, every backend's fallback.

Computed at the precision of the inputs: bf16 and fp16 are widened to fp32, fp64 stays fp64. Arguments are
taken as checked and without autograd (kernels/ops sees to both). The rows' softmax and gradient are in
reference/rows.py, the loss in reference/loss.py, the advantages in reference/advantages.py.

Shapes: N tokens, V vocabulary, M teachers, S support entries (kappa).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from smopd.kernels.reference.rows import (
    Rows,
    Target,
    merge_sorted,
    prepare_target,
    row_chunks,
    rows_forward,
    rows_gradient,
    widen,
)
from smopd.kernels.types import Candidates, KlOptions, Mixture, SparseTarget, TopK, compute_dtype

_ID_BITS = 32


def topk_logprobs(
    logits_NV: Tensor, kappa: int, *, token_ids_N: Tensor | None = None, temperature: float = 1.0
) -> TopK:
    n_rows = logits_NV.shape[0]
    dtype = compute_dtype(logits_NV.dtype)
    ids_NS = torch.empty(n_rows, kappa, dtype=torch.int32, device=logits_NV.device)
    logps_NS = torch.empty(n_rows, kappa, dtype=dtype, device=logits_NV.device)
    token_logp_N = None if token_ids_N is None else torch.empty(n_rows, dtype=dtype, device=logits_NV.device)
    for start, stop in row_chunks(logits_NV):
        scaled_NV = widen(logits_NV[start:stop].detach(), temperature)
        lse_N1 = scaled_NV.logsumexp(-1, keepdim=True)
        values_NS, ids = _topk_lowest_ids(scaled_NV, kappa)
        ids_NS[start:stop] = ids
        logps_NS[start:stop] = values_NS - lse_N1
        if token_ids_N is not None and token_logp_N is not None:
            picked_N1 = scaled_NV.gather(-1, token_ids_N[start:stop, None].long())
            token_logp_N[start:stop] = (picked_N1 - lse_N1)[:, 0]
    return TopK(ids_NS, logps_NS, token_logp_N)


def _topk_lowest_ids(values_NV: Tensor, kappa: int) -> tuple[Tensor, Tensor]:
    """torch.topk, sorted, with ties to the lower id, which torch does not promise."""
    n_vocab = values_NV.shape[-1]
    top_NS, ids_NS = values_NV.topk(min(kappa + 1, n_vocab), dim=-1)
    if kappa == 0:
        return top_NS[:, :0], ids_NS[:, :0]
    if kappa < n_vocab:
        # Only a row whose entry kappa + 1 equals its entry kappa can hold the wrong members of a tie.
        tied_N = top_NS[:, kappa - 1] == top_NS[:, kappa]
        top_NS, ids_NS = top_NS[:, :kappa], ids_NS[:, :kappa]
        if values_NV.device.type == "cpu":
            rows = tied_N.nonzero()[:, 0]
            if rows.numel() > 0:
                ids_NS = ids_NS.index_copy(0, rows, _lowest_ids_above(values_NV[rows], top_NS[rows]))
        else:  # no synchronisation on an accelerator: all rows
            ids_NS = torch.where(tied_N[:, None], _lowest_ids_above(values_NV, top_NS), ids_NS)
    # Values are sorted already; within a run of equals the ids must ascend.
    run_NS = torch.zeros_like(ids_NS)
    run_NS[:, 1:] = (top_NS[:, 1:] != top_NS[:, :-1]).cumsum(-1)
    keys_NS = ((run_NS << _ID_BITS) | ids_NS).sort(-1).values
    return top_NS, keys_NS & ((1 << _ID_BITS) - 1)


def _lowest_ids_above(values_NV: Tensor, top_NS: Tensor) -> Tensor:
    """The ids of all entries above the smallest of top_NS, then the lowest ids of those equal to it."""
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
    # Stable: ties to the lower id when merged, else to the lower teacher and then to that teacher's order.
    pool_NP, order_NP = pool_NP.sort(dim=-1, descending=True, stable=True)
    ids_NS = ids_NP.gather(-1, order_NP[:, :kept]).masked_fill(pool_NP[:, :kept] == -torch.inf, 0)
    pad = (0, kappa - kept)
    ids_NS = torch.nn.functional.pad(ids_NS, pad).to(torch.int32)
    logps_NS = torch.nn.functional.pad(pool_NP[:, :kept], pad, value=-torch.inf)
    return Mixture(ids_NS, logps_NS, logps_NS.exp().sum(-1))


def teacher_product(
    ids_NMS: Tensor,
    logps_NMS: Tensor,
    weights: Tensor,
    kappa: int,
    *,
    reference: int,
    clip: float,
    keep_raised: float,
) -> Mixture:
    n_rows, n_models, n_support = ids_NMS.shape
    dtype = compute_dtype(logps_NMS.dtype)
    others = [m for m in range(n_models) if m != reference]
    ids_NMS, logps_NMS = _joined(ids_NMS, logps_NMS.detach().to(dtype))
    ids_NS, base_NS = ids_NMS[:, reference].contiguous(), logps_NMS[:, reference]
    weights_NM = weights.detach().to(dtype).expand(n_rows, len(others))
    there_NS, total_NS = base_NS != -torch.inf, torch.zeros_like(base_NS)
    raises_NS, highest_NS = torch.zeros_like(base_NS), torch.full_like(base_NS, -torch.inf)
    for weight_N, m in zip(weights_NM.unbind(1), others, strict=True):
        at_NS = torch.searchsorted(ids_NMS[:, m].contiguous(), ids_NS).clamp(max=n_support - 1)
        logps_NS = logps_NMS[:, m].gather(-1, at_NS)
        there_NS = there_NS & (ids_NMS[:, m].gather(-1, at_NS) == ids_NS) & (logps_NS != -torch.inf)
        change_NS = weight_N[:, None] * (logps_NS - base_NS).clamp(-clip, clip)
        total_NS = total_NS + change_NS
        raises_NS = raises_NS + change_NS.clamp(min=0)
        highest_NS = torch.maximum(highest_NS, change_NS)
    total_NS = torch.where(highest_NS > keep_raised, raises_NS, total_NS)
    logq_NS = (base_NS + total_NS).masked_fill(~there_NS, -torch.inf)
    logq_NS = (logq_NS - logq_NS.logsumexp(-1, keepdim=True)).masked_fill(~there_NS, -torch.inf)
    # Stable, and ids ascend: ties go to the lower one.
    logq_NS, order_NS = logq_NS.sort(dim=-1, descending=True, stable=True)
    kept, pad = min(kappa, n_support), (0, max(0, kappa - n_support))
    ids_NS = ids_NS.gather(-1, order_NS).masked_fill(logq_NS == -torch.inf, 0)[:, :kept]
    logq_NS = torch.nn.functional.pad(logq_NS[:, :kept], pad, value=-torch.inf)
    ids_NS = torch.nn.functional.pad(ids_NS, pad).to(torch.int32)
    return Mixture(ids_NS, logq_NS, logq_NS.exp().sum(-1))


def _joined(ids_NMS: Tensor, logps_NMS: Tensor) -> tuple[Tensor, Tensor]:
    """Each model's ids ascending, repeats joined by logsumexp; behind them the largest int64 with -inf."""
    shape, none = ids_NMS.shape, torch.iinfo(torch.int64).max
    empty_NMS = logps_NMS == -torch.inf
    ids_PS, order_PS = ids_NMS.long().masked_fill(empty_NMS, none).flatten(0, 1).sort(dim=-1, stable=True)
    ids_PS, logps_PS = merge_sorted(ids_PS, logps_NMS.flatten(0, 1).gather(-1, order_PS))
    return ids_PS.masked_fill(logps_PS == -torch.inf, none).view(shape), logps_PS.view(shape)


def target_of(target: SparseTarget | Candidates, dtype: torch.dtype, *, tail: bool) -> Target:
    """The union of the teachers, or the target as given, made ready for the rows."""
    if isinstance(target, SparseTarget):
        return prepare_target(target.ids_NS, target.logps_NS, dtype, merge=tail)
    union = (target.ids_NMS, target.logps_NMS, target.log_alpha, target.kappa)
    mixture = teacher_mixture(*union, merge=target.merge)
    return prepare_target(mixture.ids_NS, mixture.logps_NS, dtype, merge=tail, distinct=target.merge)


def forward_kl_rows(
    logits_NV: Tensor,
    token_ids_N: Tensor,
    target: SparseTarget | Candidates,
    options: KlOptions,
) -> tuple[Tensor, Tensor]:
    """Each row's log-probability of its token and forward KL to its target."""
    logp_N = torch.empty(logits_NV.shape[0], dtype=compute_dtype(logits_NV.dtype), device=logits_NV.device)
    kl_N = torch.empty_like(logp_N)
    for chunk, rows in _kl_chunks(logits_NV, token_ids_N, target, options, gradient=False):
        assert rows.kl_N is not None  # there is a target
        logp_N[chunk], kl_N[chunk] = rows.logp_N, rows.kl_N
    return logp_N, kl_N


def forward_kl_gradient(
    logits_NV: Tensor,
    token_ids_N: Tensor,
    target: SparseTarget | Candidates,
    options: KlOptions,
    dlogp_N: Tensor | None,
    dkl_N: Tensor | None,
) -> Tensor:
    """The gradient of sum(dlogp logp + dkl kl) in the logits. The rows are computed again."""
    grad_NV = torch.empty_like(logits_NV)
    for chunk, rows in _kl_chunks(logits_NV, token_ids_N, target, options, gradient=True):
        dlogp = None if dlogp_N is None else dlogp_N[chunk]
        dkl = None if dkl_N is None else dkl_N[chunk]
        grad_NV[chunk] = rows_gradient(rows, dlogp, dkl, None)
    return grad_NV


def _kl_chunks(
    logits_NV: Tensor,
    token_ids_N: Tensor,
    target: SparseTarget | Candidates,
    options: KlOptions,
    *,
    gradient: bool,
) -> Iterator[tuple[slice, Rows]]:
    ready = target_of(target, compute_dtype(logits_NV.dtype), tail=options.tail)
    for start, stop in row_chunks(logits_NV):
        chunk = slice(start, stop)
        rows = rows_forward(
            logits_NV[chunk],
            token_ids_N[chunk],
            ready.rows(chunk),
            temperature=options.temperature,
            tail=options.tail,
            gradient=gradient,
        )
        yield chunk, rows
