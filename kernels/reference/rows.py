"""A chunk of rows in plain PyTorch: the softmax, the forward KL to a sparse target, and gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from smopd.kernels.reference.topk import merge_sorted, teacher_mixture, widen
from smopd.kernels.tokens import weighted
from smopd.kernels.types import TAIL_FLOOR, SparseTarget

LOGP_FLOOR = -1.0e4  # its exp is 0 in fp64: in the entropy -inf * 0 becomes 0, and NaN stays NaN


def log_softmax(logits_NV: Tensor) -> Tensor:
    """Compute the log-softmax. torch's own is 3e-5 off in fp32 on a CPU over 150,000 tokens."""
    logq_NV = logits_NV - logits_NV.amax(-1, keepdim=True)
    return logq_NV.sub_(logq_NV.exp().sum(-1, keepdim=True).log_())


@dataclass(frozen=True)
class PreparedTarget:
    """A sparse target whose ids are all in range and, with a tail, distinct.

    first_NS: one slot of each distinct id. live_N: whether the row has any support. tail_q_N: 1 - Q, None
    without a tail. A NaN log-probability empties its slot and makes mass_N NaN, which makes the KL, both
    masses and the KL's gradient NaN.
    """

    ids_NS: Tensor
    logps_NS: Tensor
    q_NS: Tensor
    first_NS: Tensor
    live_N: Tensor
    mass_N: Tensor
    tail_q_N: Tensor | None


def prepare_target(target: SparseTarget, dtype: torch.dtype, *, tail: bool) -> PreparedTarget:
    """Prepare a target or the mixture of its candidates. With tail, join repeats by logsumexp."""
    ids_NS, logps_NS, distinct = target.ids, target.logps.detach().to(dtype), False
    if target.log_alpha is not None:
        union = teacher_mixture(ids_NS, logps_NS, target.log_alpha, target.n_entries, merge=target.merge)
        ids_NS, logps_NS, distinct = union.ids_NS, union.logps_NS, target.merge
    live_NS = logps_NS > -torch.inf
    ids_NS = ids_NS.long().masked_fill(~live_NS, 0)
    if ids_NS.shape[-1] == 0:
        empty_N = logps_NS.sum(-1)
        tail_q_N = torch.ones_like(empty_N) if tail else None
        return PreparedTarget(ids_NS, logps_NS, logps_NS, live_NS, empty_N.bool(), empty_N, tail_q_N)
    nan_N = logps_NS.isnan().any(-1)
    logps_NS = logps_NS.masked_fill(~live_NS, -torch.inf)
    tail_q_N = _mass_off(logps_NS) if tail else None
    # Empty slots get the id of the best slot, which is written anyway.
    best_N1 = ids_NS.gather(-1, logps_NS.argmax(-1, keepdim=True))
    ids_NS = torch.where(live_NS, ids_NS, best_N1)
    if distinct:
        first_NS = live_NS
    else:
        ids_NS, order_NS = ids_NS.sort(dim=-1, stable=True)
        logps_NS = logps_NS.gather(-1, order_NS)
        if tail:
            merged_ids_NS, logps_NS = merge_sorted(ids_NS, logps_NS)
            first_NS = logps_NS > -torch.inf
            ids_NS = torch.where(first_NS, merged_ids_NS, best_N1)
        else:
            first_NS = torch.ones_like(live_NS)
            first_NS[:, 1:] = ids_NS[:, 1:] != ids_NS[:, :-1]
            first_NS &= live_NS.any(-1, keepdim=True)
    q_NS = logps_NS.exp()
    mass_N = q_NS.sum(-1).masked_fill(nan_N, torch.nan)
    return PreparedTarget(ids_NS, logps_NS, q_NS, first_NS, live_NS.any(-1), mass_N, tail_q_N)


def _mass_off(logps_NS: Tensor) -> Tensor:
    """Return 1 - Q, computed in fp64 against cancellation; 0 below TAIL_FLOOR."""
    wide = logps_NS.dtype if logps_NS.device.type == "mps" else torch.float64  # MPS has no fp64
    tail_q_N = -torch.expm1(logps_NS.to(wide).logsumexp(-1).clamp(max=0.0))
    return torch.where(tail_q_N < TAIL_FLOOR, 0.0, tail_q_N).to(logps_NS.dtype)


@dataclass(frozen=True)
class KlRows:
    """The forward KL of rows to a target.

    Without tail, dense_NV is the softmax. With tail it is the softmax off the support, and off_mass_N the
    student's mass there: small masses keep their relative accuracy.
    """

    dense_NV: Tensor
    off_mass_N: Tensor | None
    student_logps_NS: Tensor
    kl_N: Tensor
    student_mass_N: Tensor


def kl_forward(logits_NV: Tensor, target: PreparedTarget, temperature: float) -> KlRows:
    logq_NV = log_softmax(widen(logits_NV, temperature))
    student_logps_NS = logq_NV.gather(-1, target.ids_NS)
    nan_N, tail_q_N, off_mass_N = target.mass_N.isnan(), target.tail_q_N, None
    gap_NS = target.logps_NS - student_logps_NS
    kl_N = torch.where(target.q_NS > 0, target.q_NS * gap_NS, 0.0).sum(-1).masked_fill(nan_N, torch.nan)
    student_mass_N = torch.where(target.first_NS, student_logps_NS.exp(), 0.0).sum(-1)
    if tail_q_N is not None:
        hole_NS = torch.where(target.live_N[:, None], -torch.inf, student_logps_NS)
        logq_NV.scatter_(-1, target.ids_NS, hole_NS)
        off_logp_N = logq_NV.logsumexp(-1)
        off_mass_N = off_logp_N.exp()
        kl_N = kl_N + torch.where(tail_q_N > 0, tail_q_N * (tail_q_N.log() - off_logp_N), 0.0)
        logq_NV.sub_(torch.where(off_logp_N == -torch.inf, 0.0, off_logp_N)[:, None])
    student_mass_N = student_mass_N.masked_fill(nan_N, torch.nan)
    return KlRows(logq_NV.exp_(), off_mass_N, student_logps_NS, kl_N, student_mass_N)


def kl_gradient(rows: KlRows, target: PreparedTarget, dkl_N: Tensor) -> Tensor:
    """Return T times the gradient of sum(dkl kl) in the logits, in the memory of rows.dense_NV.

    dkl (W p_v - q_v - q_r p_v / p_r off the support), where W = Q, and Q + q_r with the tail bucket.
    """
    grad_NV, tail_q_N = rows.dense_NV, target.tail_q_N
    slope_N = off_N = weighted(dkl_N, target.mass_N if tail_q_N is None else target.mass_N + tail_q_N)
    if tail_q_N is not None and rows.off_mass_N is not None:
        off_N = slope_N * rows.off_mass_N - weighted(dkl_N, tail_q_N)
    grad_NV.mul_(off_N[:, None])
    if tail_q_N is not None:
        inside_NS = slope_N[:, None] * rows.student_logps_NS.exp()
        dense_NS = grad_NV.gather(-1, target.ids_NS)
        grad_NV.scatter_(-1, target.ids_NS, torch.where(target.live_N[:, None], inside_NS, dense_NS))
    return grad_NV.scatter_add_(-1, target.ids_NS, -dkl_N[:, None] * target.q_NS)


def policy_gradient(
    logq_NV: Tensor,
    token_ids_N1: Tensor,
    dlogp_N: Tensor,
    entropy_N: Tensor | None,
    dentropy_N: Tensor | None,
) -> Tensor:
    """Return T times the gradient of sum(dlogp logp + dentropy entropy) in the logits.

    dlogp ([v = y] - p_v) - dentropy p_v (log p_v + H)
    """
    factor = -dlogp_N[:, None]
    if entropy_N is not None and dentropy_N is not None:
        factor = factor - dentropy_N[:, None] * (logq_NV.clamp(min=LOGP_FLOOR) + entropy_N[:, None])
    return (logq_NV.exp() * factor).scatter_add_(-1, token_ids_N1, dlogp_N[:, None])
