"""A token's terms of the loss, from the statistics of its row of logits, whichever backend took them.

The clipped surrogate and the sampled reverse KL come from the token's log-probability, the forward KL from
the student's log-probabilities on the target's support.

Shapes: N tokens, S support entries (kappa).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from smopd.kernels.tokens import coefficients, counted, idle, weighted
from smopd.kernels.types import (
    CLIP_DUAL,
    CLIP_HIGH,
    CLIP_LOG_RATIO,
    CLIP_LOW,
    CLIP_REVERSE_HIGH,
    CLIP_REVERSE_LOW,
    LOG_RATIO_BOUND,
    LossSettings,
    LossTokens,
    TokenTerms,
)

TAIL_FLOOR = 2.0**-20  # teacher mass outside the support below this counts as 0 (ours: fp32 rounding of Q)
LOGP_FLOOR = -1.0e4  # exp of it is 0 in fp64 too: -inf * 0 becomes 0 in the entropy, NaN stays NaN


@dataclass(frozen=True)
class Target:
    """A sparse target made ready for the rows: ids are in range everywhere, and distinct if tail is asked.

    first_NS marks one slot for each distinct id of the support. live_N says whether a row has any support.
    A log-probability that is NaN leaves its slot empty and makes the row's mass NaN: its KL, both masses and,
    where the KL has a gradient, its gradient are NaN then. tail_q_N: the mass off the support, 1 - Q.
    """

    ids_NS: Tensor
    logps_NS: Tensor
    q_NS: Tensor
    first_NS: Tensor
    live_N: Tensor
    mass_N: Tensor
    tail_q_N: Tensor

    def rows(self, chunk: slice) -> Target:
        return Target(*(getattr(self, field.name)[chunk] for field in fields(self)))


def support_terms(
    target: Target, student_logps_NS: Tensor, off_logp_N: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """KL, student's mass on the support and, given the log of its mass off it, the target's mass off it."""
    gap_NS = target.logps_NS - student_logps_NS
    nan_N = target.mass_N.isnan()
    kl_N = torch.where(target.q_NS > 0, target.q_NS * gap_NS, 0.0).sum(-1).masked_fill(nan_N, torch.nan)
    student_mass_N = torch.where(target.first_NS, student_logps_NS.exp(), 0.0).sum(-1)
    student_mass_N = student_mass_N.masked_fill(nan_N, torch.nan)
    if off_logp_N is None:
        return kl_N, student_mass_N, None
    tail_q_N = target.tail_q_N
    kl_N = kl_N + torch.where(tail_q_N > 0, tail_q_N * (tail_q_N.log() - off_logp_N), 0.0)
    return kl_N, student_mass_N, tail_q_N


def policy_terms(
    logp_N: Tensor, tokens: LossTokens, settings: LossSettings
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Clipped surrogate and reverse term with their slopes in logp, and the clip bits."""
    dtype = logp_N.dtype
    low, high = 1.0 - settings.clip_low, 1.0 + settings.clip_high
    if tokens.old_logp_N is None:
        raw_N = torch.zeros_like(logp_N)
    else:
        raw_N = logp_N - tokens.old_logp_N.to(dtype)
    ratio_N = raw_N.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    saturated_N = raw_N.abs() > LOG_RATIO_BOUND
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
        (is_low_N, CLIP_LOW),
        (is_high_N, CLIP_HIGH),
        (is_dual_N, CLIP_DUAL),
        (saturated_N, CLIP_LOG_RATIO),
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
        bits += [(below_N, CLIP_REVERSE_LOW), (above_N, CLIP_REVERSE_HIGH)]
    clipped_N = torch.zeros_like(logp_N, dtype=torch.int8)
    for flag_N, bit in bits:
        clipped_N += flag_N * bit
    return surrogate_N, slope_N, reverse_N, reverse_slope_N, clipped_N


@dataclass(frozen=True)
class RowGradients:
    """The loss's gradients in a softmax's log-probability, KL and entropy, (N,) each, or None."""

    logp_N: Tensor | None
    kl_N: Tensor | None
    entropy_N: Tensor | None


def token_terms(
    tokens: LossTokens,
    settings: LossSettings,
    logp_N: Tensor,
    entropy_N: Tensor | None,
    kl_N: Tensor | None,
    teacher_mass_N: Tensor | None,
    student_mass_N: Tensor | None,
) -> tuple[TokenTerms, RowGradients, Tensor]:
    """The tokens' terms from their rows' statistics, what pulls at the rows, and where nothing does."""
    surrogate_N, slope_N, reverse_N, reverse_slope_N, clipped_N = policy_terms(logp_N, tokens, settings)
    uncounted_N = ~counted(tokens)

    def column(value_N: Tensor | None) -> Tensor:
        return torch.zeros_like(logp_N) if value_N is None else value_N.masked_fill(uncounted_N, 0)

    columns = (logp_N, entropy_N, kl_N, teacher_mass_N, student_mass_N, clipped_N, surrogate_N, reverse_N)
    pg_N, kl_coef_N, reverse_coef_N, ent_coef_N = coefs = coefficients(tokens, settings, logp_N.dtype)
    dlogp_N = weighted(pg_N, slope_N) + weighted(reverse_coef_N, reverse_slope_N)
    return TokenTerms(*map(column, columns)), RowGradients(dlogp_N, kl_coef_N, ent_coef_N), idle(coefs)
