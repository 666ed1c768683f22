"""A token's policy-gradient terms, from its log-probability alone: clipped surrogate, sampled reverse KL.

Shapes: N tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
)


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
