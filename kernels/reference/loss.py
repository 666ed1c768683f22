"""smopd_loss in plain PyTorch: each token's terms and, by closed forms, the gradient of its logits."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from smopd.kernels import types
from smopd.kernels.reference.rows import (
    LOGP_FLOOR,
    kl_forward,
    kl_gradient,
    log_softmax,
    policy_gradient,
    prepare_target,
)
from smopd.kernels.reference.topk import row_chunks, widen
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


def loss_rows(
    logits_NV: Tensor,
    tokens: LossTokens,
    settings: LossSettings,
    grad_NV: Tensor | None,
    *,
    entropy: bool = True,
) -> TokenTerms:
    """Compute each token's terms and, into grad_NV if given, the loss's gradient.

    grad_NV may be the logits. A backend may skip the entropy if `entropy` is False and its coefficient is 0.
    """
    parts, tokens = [], _without_uncounted_ids(tokens)
    entropy |= settings.entropy_coef != 0.0
    for chunk in row_chunks(logits_NV):
        own_grad_NV = None if grad_NV is None else grad_NV[chunk]
        parts.append(_loss_chunk(logits_NV[chunk], tokens.at(chunk), settings, own_grad_NV, entropy))
    return join_terms(parts)


def _without_uncounted_ids(tokens: LossTokens) -> LossTokens:
    """Replace the ids of tokens without any weight by 0: they may be out of range."""
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
    wide_NV = policy_gradient(logq_NV, token_ids_N1, dlogp_N, entropy_N, ent_coef_N).div_(
        settings.temperature
    )
    if kl is not None and target is not None and kl_coef_N is not None:
        wide_NV += kl_gradient(kl, target, kl_coef_N).div_(settings.kl_temperature)
    idle_N = idle(coefs)
    if wide_NV.device.type != "cpu" or bool(idle_N.any()):  # the test would synchronize a GPU
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
