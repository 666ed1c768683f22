"""GRPO, GDPO and GD2PO advantages in fp64, in three launches: sort by group, compute advantages, whiten.

After the sort, a group is a run of equal ids. For each response, the kernel loops over the response's run.
Each program stores the moments of its responses for whitening (whiten.py). There are no atomics and no
synchronization with the host.

Shapes: R responses, B responses of a program, K rewards padded to a power of two (in GRPO, _BK is (B, 1)).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from smopd.kernels.triton.mixture import NO_REGISTER_TARGET
from smopd.kernels.triton.whiten import rounded_product, store_moments, whiten_
from smopd.kernels.types import CONFLICT_FLOOR, EQUAL_ULPS, AdvantageOptions

MAX_REWARDS = 32
OWNED = 32  # upper limit of responses per program
STRIDE = 8  # responses compared at a time to find each end of a run
TILE = 512  # upper limit of responses times rewards per program
WARP_TILE = 32  # responses times rewards per warp
MAX_WARPS = 8
COUNTED = 1 << 14  # more responses than this are sorted by torch, not by _order_kernel
SORTED = 64  # responses per program of _order_kernel
SCANNED = 4096  # ids that _order_kernel reads at a time to check whether they are sorted

_EQUAL_WITHIN = tl.constexpr(EQUAL_ULPS * torch.finfo(torch.float32).eps)
_LARGEST = tl.constexpr((1 << 63) - 1)
_CONFLICT_FLOOR = tl.constexpr(CONFLICT_FLOOR)


@triton.jit
def _reward_weights(weights_ptr, stride_weights, offs_k, n_rewards, HAS_WEIGHTS: tl.constexpr):
    if HAS_WEIGHTS:
        return tl.load(weights_ptr + offs_k * stride_weights, mask=offs_k < n_rewards, other=0.0).to(
            tl.float64
        )
    else:
        return tl.where(offs_k < n_rewards, 1.0, 0.0).to(tl.float64)


@triton.jit
def _combined(value_JK, weights_K, SUMMED: tl.constexpr):
    """Return the values to normalise and the sums of their absolute terms, (J, K) or, if SUMMED, (J, 1)."""
    if SUMMED:
        # A reward of weight 0 has no effect, even if it is NaN.
        terms_JK = tl.where(weights_K[None, :] != 0.0, rounded_product(weights_K[None, :], value_JK), 0.0)
        return tl.sum(terms_JK, 1)[:, None], tl.sum(tl.abs(terms_JK), 1)[:, None]
    else:
        return value_JK, tl.abs(value_JK)


@triton.jit
def _reward_values(columns_ptr, stride_r, rows_J, inside_J, live_K, weights_K, SUMMED: tl.constexpr):
    """Load the rewards of these rows and return their _combined(). Missing rows are NaN."""
    at_JK = columns_ptr[None, :] + rows_J.to(tl.int64)[:, None] * stride_r
    inside_JK = inside_J[:, None] & live_K[None, :]
    value_JK = tl.load(at_JK, mask=inside_JK, other=float("nan")).to(tl.float64)
    return _combined(value_JK, weights_K, SUMMED)


@triton.jit
def _normalised(value_JK, mean, scale, varied):
    """Return the value normalised by Eq. 1. It is 0 for a NaN and where the group's values are equal."""
    return tl.where((value_JK == value_JK) & varied, (value_JK - mean) / scale, 0.0)


@triton.jit
def _spread(count, m2, low, high, size, norm_eps):
    """Return whether a group's values differ by more than rounding, and the divisor of Eq. 1."""
    varied = (count > 1.0) & (high - low > size * _EQUAL_WITHIN)
    return varied, tl.where(varied, tl.sqrt(m2 / tl.maximum(count - 1.0, 1.0)) + norm_eps, 1.0)


@triton.jit
def _is_dropped(adv_JK, weights_K, snr_threshold, norm_eps, SNR: tl.constexpr):
    """Return whether GD2PO drops a response because its rewards disagree."""
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
def _order_kernel(
    group_ptr, sorted_ptr, order_ptr, n_responses, B: tl.constexpr, J: tl.constexpr, S: tl.constexpr
):
    """Sort the ids stably. A response's place is the number of smaller ids and of equal ids before it.

    Each program first checks whether the ids are already sorted. If they are, each response keeps its place.
    """
    first = tl.program_id(0) * B
    offs_b = first + tl.arange(0, B)
    own_B = offs_b < n_responses
    group_B = tl.load(group_ptr + offs_b, mask=own_B, other=0)
    falls_S = tl.zeros((S,), tl.int32)
    for start in tl.range(0, n_responses - 1, S):
        offs_s = start + tl.arange(0, S)
        id_S = tl.load(group_ptr + offs_s, mask=offs_s < n_responses - 1, other=0)
        next_S = tl.load(group_ptr + offs_s + 1, mask=offs_s < n_responses - 1, other=0)
        falls_S |= (next_S < id_S).to(tl.int32)
    place_B = offs_b
    if tl.max(falls_S, 0) > 0:
        before_BJ = tl.zeros((B, J), tl.int32)
        for start in tl.range(0, n_responses, J):
            offs_j = start + tl.arange(0, J)
            id_J = tl.load(group_ptr + offs_j, mask=offs_j < n_responses, other=_LARGEST)
            if start < first:
                before_BJ += (id_J[None, :] <= group_B[:, None]).to(tl.int32)
            elif start < first + B:
                equal_BJ = (id_J[None, :] == group_B[:, None]) & (offs_j[None, :] < offs_b[:, None])
                before_BJ += ((id_J[None, :] < group_B[:, None]) | equal_BJ).to(tl.int32)
            else:
                before_BJ += (id_J[None, :] < group_B[:, None]).to(tl.int32)
        place_B = tl.sum(before_BJ, 1)
    tl.store(sorted_ptr + place_B, group_B, mask=own_B)
    tl.store(order_ptr + place_B, offs_b.to(tl.int64), mask=own_B)


def _in_order(group_R: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sorted ids and the row of each id."""
    n_responses = group_R.shape[0]
    if n_responses > COUNTED:
        return group_R.sort(stable=True)
    sorted_R, order_R = torch.empty_like(group_R), torch.empty_like(group_R)
    _order_kernel[(triton.cdiv(n_responses, SORTED),)](
        group_R, sorted_R, order_R, n_responses, B=SORTED, J=min(SORTED, 32), S=SCANNED,
        num_warps=8, num_stages=1, enable_fp_fusion=True,
    )  # fmt: skip
    return sorted_R, order_R


@triton.jit
def _is_of(group_ptr, places_BD, inside_BD, group_B):
    ids_BD = tl.load(group_ptr + places_BD, mask=inside_BD, other=0)
    return inside_BD & (ids_BD == group_B[:, None])


@triton.jit
def _run(group_ptr, offs_b, own_B, group_B, n_responses, STRIDE: tl.constexpr):
    """Return the start and end of each response's run of equal ids."""
    first_B = offs_b
    end_B = offs_b + 1
    offs_d = tl.arange(0, STRIDE)[None, :]
    growing = 1
    while growing > 0:
        before_BD = first_B[:, None] - 1 - offs_d
        behind_BD = end_B[:, None] + offs_d
        before_BD = _is_of(group_ptr, before_BD, own_B[:, None] & (before_BD >= 0), group_B)
        behind_BD = _is_of(group_ptr, behind_BD, own_B[:, None] & (behind_BD < n_responses), group_B)
        before_B = tl.sum(before_BD.to(tl.int32), 1)
        behind_B = tl.sum(behind_BD.to(tl.int32), 1)
        first_B -= before_B
        end_B += behind_B
        growing = tl.max((tl.maximum(before_B, behind_B) == STRIDE).to(tl.int32), 0)
    return first_B, end_B


@triton.jit
def _runs_kernel(
    rewards_ptr, stride_r, stride_k, group_ptr, order_ptr, weights_ptr, stride_weights, adv_ptr, kept_ptr,
    lengths_ptr, stride_lengths, moments_ptr,
    n_responses, n_rewards, norm_eps: tl.float64, snr_threshold: tl.float64,
    HAS_WEIGHTS: tl.constexpr, SUMMED: tl.constexpr, DROP: tl.constexpr, SNR: tl.constexpr,
    WHITEN: tl.constexpr, TOKENS: tl.constexpr, K: tl.constexpr, B: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Compute the advantages. group_ptr points to the ascending ids, and order_ptr to the row of each id."""
    KV: tl.constexpr = 1 if SUMMED else K
    offs_k = tl.arange(0, K)
    live_K = offs_k < n_rewards
    weights_K = _reward_weights(weights_ptr, stride_weights, offs_k, n_rewards, HAS_WEIGHTS)
    weights_KV = weights_K
    if SUMMED:
        weights_KV = tl.full((1,), 1.0, tl.float64)
    offs_b = tl.program_id(0) * B + tl.arange(0, B)
    own_B = offs_b < n_responses
    group_B = tl.load(group_ptr + offs_b, mask=own_B, other=0)
    rows_B = tl.load(order_ptr + offs_b, mask=own_B, other=0)
    columns_ptr = rewards_ptr + offs_k.to(tl.int64) * stride_k
    own_BK = _reward_values(columns_ptr, stride_r, rows_B, own_B, live_K, weights_K, SUMMED)[0]
    first_B, end_B = _run(group_ptr, offs_b, own_B, group_B, n_responses, STRIDE)
    size_B = tl.where(own_B, end_B - first_B, 0)
    longest = tl.max(size_B, 0)
    WIDE: tl.constexpr = tl.float64 if SUMMED else tl.float32  # dtype of the values to normalise
    count_BK = tl.zeros((B, KV), tl.int32)
    start_BK = tl.full((B, KV), float("nan"), WIDE)  # the run's first value. Deviations from it are small
    sum_BK = tl.zeros((B, KV), tl.float64)
    square_BK = tl.zeros((B, KV), tl.float64)
    low_BK = tl.full((B, KV), float("inf"), WIDE)
    high_BK = tl.full((B, KV), -float("inf"), WIDE)
    largest_BK = tl.zeros((B, KV), tl.float64)
    for step in tl.range(0, longest):
        inside_B = step < size_B
        row_B = tl.load(order_ptr + first_B + step, mask=inside_B, other=0)
        at_BK = columns_ptr[None, :] + row_B[:, None] * stride_r
        inside_BK = inside_B[:, None] & live_K[None, :]
        value_BK = tl.load(at_BK, mask=inside_BK, other=float("nan")).to(WIDE)
        if SUMMED:
            value_BK, more_BK = _combined(value_BK, weights_K, SUMMED)
            value_BK = tl.where(inside_B[:, None], value_BK, float("nan"))
            largest_BK = tl.maximum(largest_BK, tl.where(value_BK == value_BK, more_BK, 0.0))
        known_BK = value_BK == value_BK
        count_BK += known_BK.to(tl.int32)
        start_BK = tl.where(start_BK == start_BK, start_BK, value_BK)
        deviation_BK = tl.where(known_BK, value_BK.to(tl.float64) - start_BK.to(tl.float64), 0.0)
        sum_BK += deviation_BK
        square_BK += deviation_BK * deviation_BK
        low_BK = tl.where(value_BK < low_BK, value_BK, low_BK)  # ignores NaN
        high_BK = tl.where(value_BK > high_BK, value_BK, high_BK)
    count_BK = count_BK.to(tl.float64)
    low_BK = low_BK.to(tl.float64)
    high_BK = high_BK.to(tl.float64)
    if not SUMMED:
        largest_BK = tl.maximum(tl.abs(low_BK), tl.abs(high_BK))
    from_start_BK = sum_BK / tl.maximum(count_BK, 1.0)
    mean_BK = start_BK.to(tl.float64) + from_start_BK
    m2_BK = tl.maximum(square_BK - sum_BK * from_start_BK, 0.0)
    varied_BK, scale_BK = _spread(count_BK, m2_BK, low_BK, high_BK, largest_BK, norm_eps)
    adv_BK = _normalised(own_BK, mean_BK, scale_BK, varied_BK)
    adv_B = tl.sum(rounded_product(adv_BK, weights_KV[None, :]), 1)
    kept_B = tl.full((B,), 1, tl.int32)
    if DROP:
        n_kept_B = tl.zeros((B,), tl.int32)
        for step in tl.range(0, longest):
            inside_B = step < size_B
            row_B = tl.load(order_ptr + first_B + step, mask=inside_B, other=0)
            each_BK = _reward_values(columns_ptr, stride_r, row_B, inside_B, live_K, weights_K, SUMMED)[0]
            each_BK = _normalised(each_BK, mean_BK, scale_BK, varied_BK)
            dropped_B = _is_dropped(each_BK, weights_KV, snr_threshold, norm_eps, SNR)
            n_kept_B += (inside_B & (dropped_B == 0)).to(tl.int32)
        dropped_B = _is_dropped(adv_BK, weights_KV, snr_threshold, norm_eps, SNR)
        kept_B = tl.where(dropped_B, 0, 1)
        share_B = n_kept_B.to(tl.float64) / tl.maximum(size_B, 1).to(tl.float64)
        adv_B = tl.where(dropped_B, 0.0, adv_B * share_B)
        tl.store(kept_ptr + rows_B, kept_B != 0, mask=own_B)
    if WHITEN:  # leaves out responses that no reward scored, and marks them with infinity
        scored_B = tl.max(((own_BK == own_BK) & (weights_KV[None, :] != 0.0)).to(tl.int32), 1)
        counted_B = kept_B * scored_B
        store_moments(moments_ptr, adv_B, counted_B, own_B, lengths_ptr, stride_lengths, rows_B, TOKENS)
        adv_B = tl.where(scored_B != 0, adv_B, float("inf"))
    tl.store(adv_ptr + rows_B, adv_B.to(adv_ptr.dtype.element_ty), mask=own_B)


def unserved(op: str, rewards_RK: Tensor) -> str | None:
    """Return why the advantages cannot be computed here, or None."""
    if not 1 <= rewards_RK.shape[1] <= MAX_REWARDS:
        return f"K is {rewards_RK.shape[1]}, expected 1 to {MAX_REWARDS}"
    if rewards_RK.shape[0] >= 1 << 30:
        return f"R is {rewards_RK.shape[0]}, expected less than 2^30"
    return None


def advantages(
    rewards_RK: Tensor, group_R: Tensor, options: AdvantageOptions, process_group: Any = None
) -> tuple[Tensor, Tensor | None]:
    """Return adv_R and kept_R. Except for GD2PO, kept_R is None."""
    weights_K, whiten, norm_eps = options.weights_K, options.whiten, options.norm_eps
    snr_threshold, drop = options.snr_threshold, options.kind == "gd2po"
    n_responses, n_rewards = rewards_RK.shape
    device = rewards_RK.device
    out_R = torch.empty(n_responses, dtype=torch.float32, device=device)
    kept_R = torch.empty(n_responses, dtype=torch.bool, device=device) if drop else None
    adv_R = out_R if whiten is None else torch.empty(n_responses, dtype=torch.float64, device=device)
    tokens_R = options.lengths_R if whiten == "tokens" else None
    padded = triton.next_power_of_2(n_rewards)
    owned = min(OWNED, TILE // padded)
    n_programs = triton.cdiv(n_responses, owned)
    moments_P3 = torch.empty(0 if whiten is None else n_programs, 3, dtype=torch.float64, device=device)
    if n_responses > 0:
        sorted_R, order_R = _in_order(group_R.contiguous())
        _runs_kernel[(n_programs,)](
            rewards_RK, *rewards_RK.stride(), sorted_R, order_R,
            rewards_RK if weights_K is None else weights_K, 0 if weights_K is None else weights_K.stride(0),
            adv_R, adv_R if kept_R is None else kept_R,
            adv_R if tokens_R is None else tokens_R, 0 if tokens_R is None else tokens_R.stride(0),
            moments_P3,
            n_responses, n_rewards, float(norm_eps), 0.0 if snr_threshold is None else float(snr_threshold),
            HAS_WEIGHTS=weights_K is not None, SUMMED=options.kind == "grpo", DROP=drop,
            SNR=snr_threshold is not None, WHITEN=whiten is not None, TOKENS=tokens_R is not None,
            K=padded, B=owned, STRIDE=STRIDE,
            num_warps=min(max(owned * padded // WARP_TILE, 1), MAX_WARPS), num_stages=1,
            maxnreg=NO_REGISTER_TARGET, enable_fp_fusion=True,
        )  # fmt: skip
    if whiten is not None:
        whiten_(adv_R, kept_R, tokens_R, moments_P3, out_R, norm_eps, process_group)
    return out_R, kept_R
