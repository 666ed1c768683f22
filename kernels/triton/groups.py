"""Advantages of groups that lie anywhere, in any order and of any size; what all advantage kernels share.

A program owns some responses. It looks once through all ids for the stretch that can hold its groups' members
(the ids between its lowest and highest), then takes its groups one after the other over that stretch. No sum
is atomic: each has one order. fp64 throughout, as the reference.

Shapes: R responses, K rewards (1 in GRPO: their weighted sum). In kernels: B responses that a program owns,
J responses of a block of the stretch, S of a block of all, K padded to a power of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from smopd.kernels.triton.whiten import merge_moments, rounded_product, store_moments
from smopd.kernels.types import CONFLICT_FLOOR, EQUAL_ULPS

# What a program of runs_kernel met, as bits.
RISES = tl.constexpr(1)
FALLS = tl.constexpr(2)
LONG = tl.constexpr(4)

_INT64_MAX = tl.constexpr(2**63 - 1)
_INT64_MIN = tl.constexpr(-(2**63))
_EQUAL_WITHIN = tl.constexpr(EQUAL_ULPS * torch.finfo(torch.float32).eps)
_CONFLICT_FLOOR = tl.constexpr(CONFLICT_FLOOR)


@triton.jit
def reward_weights(weights_ptr, stride_weights, offs_k, n_rewards, HAS_WEIGHTS: tl.constexpr):
    if HAS_WEIGHTS:
        return tl.load(weights_ptr + offs_k * stride_weights, mask=offs_k < n_rewards, other=0.0).to(
            tl.float64
        )
    else:
        return tl.where(offs_k < n_rewards, 1.0, 0.0).to(tl.float64)


@triton.jit
def combined(value_JK, weights_K, SUMMED: tl.constexpr):
    """What is normalised and the size it was computed from: rewards (J, K), or if SUMMED their sum (J, 1)."""
    if SUMMED:
        # A reward of weight 0 plays no part, not even by being NaN.
        terms_JK = tl.where(weights_K[None, :] != 0.0, rounded_product(weights_K[None, :], value_JK), 0.0)
        return tl.sum(terms_JK, 1)[:, None], tl.sum(tl.abs(terms_JK), 1)[:, None]
    else:
        return value_JK, tl.abs(value_JK)


@triton.jit
def reward_values(columns_ptr, stride_r, rows_J, inside_J, live_K, weights_K, SUMMED: tl.constexpr):
    """combined() of these rows; NaN: none there."""
    at_JK = columns_ptr[None, :] + rows_J.to(tl.int64)[:, None] * stride_r
    inside_JK = inside_J[:, None] & live_K[None, :]
    value_JK = tl.load(at_JK, mask=inside_JK, other=float("nan")).to(tl.float64)
    return combined(value_JK, weights_K, SUMMED)


@triton.jit
def normalised(value_JK, mean, scale, varied):
    """Eq. 1; 0 for a NaN and where the group's values are equal. Of one group, or of each response's."""
    return tl.where((value_JK == value_JK) & varied, (value_JK - mean) / scale, 0.0)


@triton.jit
def spread(count, m2, low, high, size, norm_eps):
    """Whether a group's values differ by more than rounding, and what their deviations are divided by."""
    varied = (count > 1.0) & (high - low > size * _EQUAL_WITHIN)
    return varied, tl.where(varied, tl.sqrt(m2 / tl.maximum(count - 1.0, 1.0)) + norm_eps, 1.0)


@triton.jit
def is_dropped(adv_JK, weights_K, snr_threshold, norm_eps, SNR: tl.constexpr):
    """Whether GD2PO drops a response: its rewards pull in opposite directions."""
    parts_JK = rounded_product(adv_JK, weights_K[None, :])
    signed_JK = tl.abs(adv_JK) > _CONFLICT_FLOOR
    up_J = tl.max((signed_JK & (parts_JK > 0.0)).to(tl.int32), 1)
    down_J = tl.max((signed_JK & (parts_JK < 0.0)).to(tl.int32), 1)
    dropped_J = (up_J > 0) & (down_J > 0)
    if SNR:
        ratio_J = tl.abs(tl.sum(parts_JK, 1)) / (tl.sum(tl.abs(parts_JK), 1) + norm_eps)
        dropped_J = dropped_J & (ratio_J < snr_threshold)
    return dropped_J


@triton.jit
def _members(group_ptr, stride_group, rows_J, last, group):
    inside_J = rows_J <= last
    ids_J = tl.load(group_ptr + rows_J.to(tl.int64) * stride_group, mask=inside_J, other=0)
    return inside_J & (ids_J == group)


@triton.jit
def _stretch(group_ptr, stride_group, n_responses, lowest, highest, BLOCK: tl.constexpr):
    """First and last response whose group id lies in lowest..highest."""
    first_S = tl.full((BLOCK,), 0, tl.int32) + n_responses
    last_S = tl.full((BLOCK,), -1, tl.int32)
    for start in tl.range(0, n_responses, BLOCK):
        offs_s = start + tl.arange(0, BLOCK)
        inside_S = offs_s < n_responses
        ids_S = tl.load(group_ptr + offs_s.to(tl.int64) * stride_group, mask=inside_S, other=0)
        hit_S = inside_S & (ids_S >= lowest) & (ids_S <= highest)
        first_S = tl.where(hit_S, tl.minimum(first_S, offs_s), first_S)
        last_S = tl.where(hit_S, offs_s, last_S)
    return tl.min(first_S, 0), tl.max(last_S, 0)


@triton.jit
def _are_runs(broken_ptr, BLOCK: tl.constexpr):
    """Whether no program of runs_kernel met what it does not serve."""
    offs_s = tl.arange(0, BLOCK)
    broken_S = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(0, tl.num_programs(0), BLOCK):
        broken_S |= tl.load(broken_ptr + start + offs_s, mask=start + offs_s < tl.num_programs(0), other=0)
    rises = tl.max(broken_S & RISES, 0) > 0
    falls = tl.max(broken_S & FALLS, 0) > 0
    return (tl.max(broken_S & LONG, 0) == 0) & ((rises == 0) | (falls == 0))


@triton.jit
def scattered_kernel(
    rewards_ptr, stride_r, stride_k, group_ptr, stride_group, weights_ptr, stride_weights, adv_ptr, kept_ptr,
    lengths_ptr, stride_lengths, moments_ptr, broken_ptr,
    n_responses, n_rewards, norm_eps: tl.float64, snr_threshold: tl.float64,
    HAS_WEIGHTS: tl.constexpr, SUMMED: tl.constexpr, DROP: tl.constexpr, SNR: tl.constexpr,
    WHITEN: tl.constexpr, TOKENS: tl.constexpr,
    K: tl.constexpr, B: tl.constexpr, J: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """Groups wherever they lie; returns at once where runs_kernel could serve them."""
    if _are_runs(broken_ptr, SCAN):
        return
    KV: tl.constexpr = 1 if SUMMED else K
    offs_k = tl.arange(0, K)
    offs_j = tl.arange(0, J)
    weights_K = reward_weights(weights_ptr, stride_weights, offs_k, n_rewards, HAS_WEIGHTS)
    weights_KV = weights_K
    if SUMMED:
        weights_KV = tl.full((1,), 1.0, tl.float64)
    offs_b = tl.program_id(0) * B + tl.arange(0, B)
    own_B = offs_b < n_responses
    group_B = tl.load(group_ptr + offs_b.to(tl.int64) * stride_group, mask=own_B, other=0)
    columns_ptr = rewards_ptr + offs_k.to(tl.int64) * stride_k
    live_K = offs_k < n_rewards
    own_BK = reward_values(columns_ptr, stride_r, offs_b, own_B, live_K, weights_K, SUMMED)[0]
    lowest = tl.min(tl.where(own_B, group_B, _INT64_MAX), 0)
    highest = tl.max(tl.where(own_B, group_B, _INT64_MIN), 0)
    first, last = _stretch(group_ptr, stride_group, n_responses, lowest, highest, SCAN)

    adv_B = tl.zeros((B,), tl.float64)
    kept_B = tl.full((B,), 1, tl.int32)
    todo_B = own_B.to(tl.int32)
    left = tl.sum(todo_B, 0)
    while left > 0:
        leader = tl.min(tl.where(todo_B > 0, offs_b, 2147483647), 0)
        group = tl.sum(tl.where(offs_b == leader, group_B, 0), 0)
        mine_B = own_B & (group_B == group)

        members = tl.zeros((), tl.float64)
        count_K = tl.zeros((KV,), tl.float64)
        mean_K = tl.zeros((KV,), tl.float64)
        m2_K = tl.zeros((KV,), tl.float64)
        low_K = tl.full((KV,), float("inf"), tl.float64)
        high_K = tl.full((KV,), -float("inf"), tl.float64)
        size_K = tl.zeros((KV,), tl.float64)
        for start in tl.range(first, last + 1, J):
            rows_J = start + offs_j
            member_J = _members(group_ptr, stride_group, rows_J, last, group)
            found = tl.sum(member_J.to(tl.int32), 0)
            if found > 0:
                value_JK, size_JK = reward_values(
                    columns_ptr, stride_r, rows_J, member_J, live_K, weights_K, SUMMED
                )
                known_JK = member_J[:, None] & (value_JK == value_JK)
                value_JK = tl.where(known_JK, value_JK, 0.0)
                more_K = tl.sum(known_JK.to(tl.float64), 0)
                more_mean_K = tl.sum(value_JK, 0) / tl.maximum(more_K, 1.0)
                centred_JK = tl.where(known_JK, value_JK - more_mean_K[None, :], 0.0)
                more_m2_K = tl.sum(rounded_product(centred_JK, centred_JK), 0)
                count_K, mean_K, m2_K = merge_moments(count_K, mean_K, m2_K, more_K, more_mean_K, more_m2_K)
                low_K = tl.minimum(low_K, tl.min(tl.where(known_JK, value_JK, float("inf")), 0))
                high_K = tl.maximum(high_K, tl.max(tl.where(known_JK, value_JK, -float("inf")), 0))
                size_K = tl.maximum(size_K, tl.max(tl.where(known_JK, size_JK, 0.0), 0))
                members += found
        varied_K, scale_K = spread(count_K, m2_K, low_K, high_K, size_K, norm_eps)
        adv_BK = normalised(own_BK, mean_K[None, :], scale_K[None, :], varied_K[None, :])
        group_adv_B = tl.sum(rounded_product(adv_BK, weights_KV[None, :]), 1)
        if DROP:
            n_kept = tl.zeros((), tl.float64)
            for start in tl.range(first, last + 1, J):
                rows_J = start + offs_j
                member_J = _members(group_ptr, stride_group, rows_J, last, group)
                if tl.sum(member_J.to(tl.int32), 0) > 0:
                    adv_JK = reward_values(
                        columns_ptr, stride_r, rows_J, member_J, live_K, weights_K, SUMMED
                    )[0]
                    adv_JK = normalised(adv_JK, mean_K[None, :], scale_K[None, :], varied_K[None, :])
                    dropped_J = is_dropped(adv_JK, weights_KV, snr_threshold, norm_eps, SNR)
                    n_kept += tl.sum((member_J & (dropped_J == 0)).to(tl.int32), 0)
            dropped_B = mine_B & is_dropped(adv_BK, weights_KV, snr_threshold, norm_eps, SNR)
            kept_B = tl.where(dropped_B, 0, kept_B)
            group_adv_B = tl.where(dropped_B, 0.0, group_adv_B * (n_kept / members))
        adv_B = tl.where(mine_B, group_adv_B, adv_B)
        todo_B = tl.where(mine_B, 0, todo_B)
        left = tl.sum(todo_B, 0)
    tl.store(adv_ptr + offs_b, adv_B.to(adv_ptr.dtype.element_ty), mask=own_B)
    if DROP:
        tl.store(kept_ptr + offs_b, kept_B != 0, mask=own_B)
    if WHITEN:
        store_moments(moments_ptr, adv_B, kept_B, own_B, lengths_ptr, stride_lengths, offs_b, TOKENS)
