"""The terms of smopd_loss and their closed-form gradient in the logits, in plain PyTorch, chunk by chunk."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from smopd.kernels import types
from smopd.kernels.reference.topk import merge_sorted, row_chunks, teacher_mixture, widen
from smopd.kernels.tokens import (
    STATS_FIELDS,
    coefficients,
    counted,
    idle,
    join_terms,
    reverse_weight,
    steady_sum,
    weighted,
)
from smopd.kernels.types import LossSettings, LossStats, LossTokens, TokenTerms, compute_dtype, loss_target

LOGP_FLOOR = -1.0e4  # lower bound of log p in the entropy. p is 0 there, even in fp64: p log p is 0, not NaN


def loss_rows(
    logits_NV: Tensor,
    tokens: LossTokens,
    settings: LossSettings,
    grad_NV: Tensor | None,
    *,
    entropy: bool = True,
) -> TokenTerms:
    """Return each token's terms, and write the loss's gradient into grad_NV if it is given.

    grad_NV may be logits_NV. A backend may skip the entropy if `entropy` is False and entropy_coef is 0.
    """
    parts, tokens = [], _without_uncounted_ids(tokens)
    entropy |= settings.entropy_coef != 0.0
    for chunk in row_chunks(logits_NV):
        own_grad_NV = None if grad_NV is None else grad_NV[chunk]
        parts.append(_loss_chunk(logits_NV[chunk], tokens.at(chunk), settings, own_grad_NV, entropy))
    return join_terms(parts)


def _without_uncounted_ids(tokens: LossTokens) -> LossTokens:
    """Return the tokens with ids set to 0 where all weights are 0, as these ids may be out of range."""
    uncounted_N = ~counted(tokens)
    known = {}
    for name in ("token_ids_N", "target_ids_NS", "teacher_ids_NMS"):
        ids = getattr(tokens, name)
        if ids is not None:
            known[name] = ids.masked_fill(uncounted_N.view(-1, *[1] * (ids.dim() - 1)), 0)
    return replace(tokens, **known)


def _loss_chunk(
    logits_NV: Tensor, tokens: LossTokens, settings: LossSettings, grad_NV: Tensor | None, entropy: bool
) -> TokenTerms:
    dtype = compute_dtype(logits_NV.dtype)
    given = loss_target(tokens, settings)
    target = None if given is None else prepare_target(given, dtype, tail=settings.tail)
    token_ids_N1 = tokens.token_ids_N[:, None].long()
    logq_NV = log_softmax(widen(logits_NV, settings.temperature))
    logp_N = logq_NV.gather(-1, token_ids_N1)[:, 0]
    entropy_N = -(logq_NV.clamp(min=LOGP_FLOOR) * logq_NV.exp()).sum(-1) if entropy else None
    kl = None if target is None else kl_forward(logits_NV, target, settings.kl_temperature)
    surrogate_N, slope_N, reverse_N, reverse_slope_N, clipped_N = _policy_terms(logp_N, tokens, settings)
    uncounted_N = ~counted(tokens)

    def column(value_N: Tensor | None) -> Tensor:
        return torch.zeros_like(logp_N) if value_N is None else value_N.masked_fill(uncounted_N, 0)

    terms = TokenTerms(
        logp_N=column(logp_N),
        entropy_N=column(entropy_N),
        kl_N=column(None if kl is None else kl.kl_N),
        teacher_mass_N=column(None if target is None else target.mass_N),
        student_mass_N=column(None if kl is None else kl.student_mass_N),
        clipped_N=column(clipped_N),
        surrogate_N=column(surrogate_N),
        reverse_N=column(reverse_N),
    )
    if grad_NV is None:
        return terms
    pg_N, kl_coef_N, reverse_coef_N, ent_coef_N = coefs = coefficients(tokens, settings, dtype)
    dlogp_N = weighted(pg_N, slope_N) + weighted(reverse_coef_N, reverse_slope_N)
    wide_NV = policy_gradient(logq_NV, token_ids_N1, dlogp_N, entropy_N, ent_coef_N)
    wide_NV.div_(settings.temperature)
    if kl is not None and target is not None and kl_coef_N is not None:
        wide_NV += kl_gradient(kl, target, kl_coef_N).div_(settings.kl_temperature)
    idle_N = idle(coefs)
    if wide_NV.device.type != "cpu" or bool(idle_N.any()):  # any() would synchronize a GPU
        wide_NV.masked_fill_(idle_N[:, None], 0.0)
    grad_NV.copy_(wide_NV)
    return terms


def _policy_terms(
    logp_N: Tensor, tokens: LossTokens, settings: LossSettings
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the clipped surrogate, its slope in logp, the reverse term, its slope, and the clip bits."""
    dtype = logp_N.dtype
    low, high = 1.0 - settings.clip_low, 1.0 + settings.clip_high
    if tokens.old_logp_N is None:
        raw_N = torch.zeros_like(logp_N)
    else:
        raw_N = logp_N - tokens.old_logp_N.to(dtype)
    ratio_N = raw_N.clamp(-types.LOG_RATIO_BOUND, types.LOG_RATIO_BOUND).exp()
    saturated_N = raw_N.abs() > types.LOG_RATIO_BOUND
    below_N, above_N = ratio_N < low, ratio_N > high
    clipped_ratio_N = ratio_N.clamp(low, high)

    adv_N = tokens.adv_N.to(dtype)
    surrogate_N = torch.maximum(-adv_N * ratio_N, -adv_N * clipped_ratio_N)
    is_low_N, is_high_N = below_N & (adv_N < 0), above_N & (adv_N > 0)
    is_dual_N = torch.zeros_like(is_low_N)
    if settings.dual_clip is not None:
        bound_N = -settings.dual_clip * adv_N
        is_dual_N = (adv_N < 0) & (surrogate_N > bound_N)
        surrogate_N = torch.where(is_dual_N, bound_N, surrogate_N)
    flat_N = is_low_N | is_high_N | is_dual_N | saturated_N
    slope_N = torch.where(flat_N, 0.0, -adv_N * ratio_N)
    bits = [
        (is_low_N, types.CLIP_LOW),
        (is_high_N, types.CLIP_HIGH),
        (is_dual_N, types.CLIP_DUAL),
        (saturated_N, types.CLIP_LOG_RATIO),
    ]

    reverse_N = reverse_slope_N = torch.zeros_like(logp_N)
    if tokens.reverse_adv_N is not None:
        reverse_adv_N = tokens.reverse_adv_N.to(dtype)
        if settings.reverse_kl_surrogate == "ppo":
            reverse_N = torch.maximum(-reverse_adv_N * ratio_N, -reverse_adv_N * clipped_ratio_N)
            below_N, above_N = below_N & (reverse_adv_N < 0), above_N & (reverse_adv_N > 0)
        else:
            reverse_N = -reverse_adv_N * clipped_ratio_N
        flat_N = below_N | above_N | saturated_N
        reverse_slope_N = torch.where(flat_N, 0.0, -reverse_adv_N * ratio_N)
        bits += [(below_N, types.CLIP_REVERSE_LOW), (above_N, types.CLIP_REVERSE_HIGH)]
    clipped_N = torch.zeros_like(logp_N, dtype=torch.int8)
    for flag_N, bit in bits:
        clipped_N += flag_N * bit
    return surrogate_N, slope_N, reverse_N, reverse_slope_N, clipped_N


def total_loss(terms: TokenTerms, tokens: LossTokens, settings: LossSettings) -> tuple[Tensor, LossStats]:
    """Sum the weighted terms over all tokens. A term of weight 0 adds 0, even if it is NaN."""
    columns = {name: getattr(terms, name) for name in STATS_FIELDS if name.endswith("_N")}
    pg_loss = steady_sum(weighted(tokens.pg_weight_N, terms.surrogate_N))
    kl_loss = steady_sum(weighted(tokens.kl_weight_N, terms.kl_N))
    reverse_loss = steady_sum(weighted(reverse_weight(tokens), terms.reverse_N))
    entropy = steady_sum(weighted(tokens.ent_weight_N, terms.entropy_N))
    stats = LossStats(**columns, pg_loss=pg_loss, kl_loss=kl_loss, entropy=entropy, reverse_loss=reverse_loss)
    loss = pg_loss.clone()
    if settings.opd_coef != 0.0:
        loss = loss + settings.opd_coef * (kl_loss + reverse_loss)
    if settings.entropy_coef != 0.0:
        loss = loss - settings.entropy_coef * entropy
    return loss, stats


def scale_(grad: Tensor, dloss: Tensor, out: Tensor | None = None) -> None:
    if out is not None:
        torch.mul(grad.to(compute_dtype(grad.dtype)), dloss, out=out)
    elif dloss.device.type != "cpu":
        grad.copy_(grad.to(compute_dtype(grad.dtype)) * dloss)
    elif dloss.item() != 1.0:
        grad.mul_(dloss.item())


def log_softmax(logits_NV: Tensor) -> Tensor:
    """Compute the log-softmax. In fp32 on a CPU, torch's own is 3e-5 off at a vocabulary of 150,000."""
    logq_NV = logits_NV - logits_NV.amax(-1, keepdim=True)
    return logq_NV.sub_(logq_NV.exp().sum(-1, keepdim=True).log_())


@dataclass(frozen=True)
class PreparedTarget:
    """A sparse target whose ids are all in range. With a tail, the ids of its nonempty slots are distinct.

    first_NS is True at one slot of each distinct id. live_N says whether the row has any support. tail_q_N is
    1 - Q, or None without a tail. A NaN log-probability empties its slot and makes mass_N NaN. This makes the
    KL, both masses and the KL's gradient NaN.
    """

    ids_NS: Tensor
    logps_NS: Tensor
    q_NS: Tensor
    first_NS: Tensor
    live_N: Tensor
    mass_N: Tensor
    tail_q_N: Tensor | None


def prepare_target(target: types.SparseTarget, dtype: torch.dtype, *, tail: bool) -> PreparedTarget:
    """Prepare a target, or the mixture of its candidates. With a tail, merge repeats by logsumexp."""
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
    # Empty slots use the id of the best slot, whose entry is written anyway.
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
    """Return 1 - Q, computed in fp64 to avoid cancellation. Values below types.TAIL_FLOOR become 0."""
    wide = logps_NS.dtype if logps_NS.device.type == "mps" else torch.float64  # MPS has no fp64
    tail_q_N = -torch.expm1(logps_NS.to(wide).logsumexp(-1).clamp(max=0.0))
    return torch.where(tail_q_N < types.TAIL_FLOOR, 0.0, tail_q_N).to(logps_NS.dtype)


@dataclass(frozen=True)
class KlRows:
    """The forward KL of rows to a target.

    Without a tail, dense_NV is the softmax. With a tail, it is the softmax over the tokens off the support,
    and off_mass_N is their total probability. This keeps the relative accuracy of small masses.
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
    """Return T times the gradient of sum(dkl kl) in the logits. The result overwrites rows.dense_NV.

    It is dkl (W p_v - q_v) on the support and dkl (W - q_r / p_r) p_v off the support.
    W is Q + q_r. Without a tail, q_r is 0.
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

    It is dlogp ([v = y] - p_v) - dentropy p_v (log p_v + H).
    """
    factor = -dlogp_N[:, None]
    if entropy_N is not None and dentropy_N is not None:
        factor = factor - dentropy_N[:, None] * (logq_NV.clamp(min=LOGP_FLOOR) + entropy_N[:, None])
    return (logq_NV.exp() * factor).scatter_add_(-1, token_ids_N1, dlogp_N[:, None])
