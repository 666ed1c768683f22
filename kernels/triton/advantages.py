"""GRPO, GDPO and GD2PO advantages on the GPU, whitened: two launches and one to whiten.

Groups mostly lie side by side. The first launch takes the ids to be runs and each response to belong to its
own: a program serves a few responses, and each walks through its run. It notes whether the ids rise, fall,
and whether a run is long: ids that only rise or only fall are runs. The second launch reads these notes; if
they say no it does all groups again wherever they lie (smopd.kernels.triton.groups), else it ends there. So
the device decides, no host waits, and a CUDA graph replays both. Each program leaves the moments of its own
responses, and the third launch whitens (smopd.kernels.triton.whiten). No sum is atomic. fp64 throughout.

Shapes: R responses, K rewards (1 in GRPO: their weighted sum). In kernels: B responses that a program owns,
K padded to a power of two.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from smopd.kernels.triton.groups import (
    FALLS,
    LONG,
    RISES,
    combined,
    is_dropped,
    normalised,
    reward_values,
    reward_weights,
    scattered_kernel,
    spread,
)
from smopd.kernels.triton.mixture import NO_REGISTER_TARGET
from smopd.kernels.triton.whiten import rounded_product, store_moments, whiten_
from smopd.kernels.types import AdvantageOptions

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SERVED = ("grpo_advantages", "gdpo_advantages", "gd2po_advantages")
MAX_REWARDS = 32
OWNED = 32  # responses of a program, at most
STRIDE = 8  # responses of a run that are looked at at a time, on both sides
LONGEST = 64  # responses of a run that each of its members walks through
TILE = 512  # responses times rewards held at a time where groups lie anywhere
WARP_TILE = 32  # the same of a warp where groups are runs
MAX_WARPS = 8
SCAN_BLOCK = 2048


@triton.jit
def _is_of(group_ptr, stride_group, rows_BD, inside_BD, group_B):
    ids_BD = tl.load(group_ptr + rows_BD.to(tl.int64) * stride_group, mask=inside_BD, other=0)
    return inside_BD & (ids_BD == group_B[:, None])


@triton.jit
def _run(
    group_ptr, stride_group, offs_b, own_B, group_B, n_responses, LONGEST: tl.constexpr, STRIDE: tl.constexpr
):
    """First row and the one behind the last of each response's run of equal ids; and what the ids do here."""
    next_B = own_B & (offs_b + 1 < n_responses)
    id_B = tl.load(group_ptr + (offs_b + 1).to(tl.int64) * stride_group, mask=next_B, other=0)
    met = tl.max(tl.where(next_B & (id_B > group_B), RISES, 0), 0)
    met |= tl.max(tl.where(next_B & (id_B < group_B), FALLS, 0), 0)
    first_B = offs_b
    end_B = offs_b + 1
    offs_d = tl.arange(0, STRIDE)[None, :]
    steps = 0
    growing = 1
    while (growing > 0) & (steps < LONGEST):
        before_BD = first_B[:, None] - 1 - offs_d
        behind_BD = end_B[:, None] + offs_d
        before_BD = _is_of(group_ptr, stride_group, before_BD, own_B[:, None] & (before_BD >= 0), group_B)
        behind_BD = _is_of(
            group_ptr, stride_group, behind_BD, own_B[:, None] & (behind_BD < n_responses), group_B
        )
        before_B = tl.sum(before_BD.to(tl.int32), 1)
        behind_B = tl.sum(behind_BD.to(tl.int32), 1)
        first_B -= before_B
        end_B += behind_B
        growing = tl.max((tl.maximum(before_B, behind_B) == STRIDE).to(tl.int32), 0)
        steps += STRIDE
    return first_B, end_B, met | tl.where(growing > 0, LONG, 0)


@triton.jit
def _runs_kernel(
    rewards_ptr, stride_r, stride_k, group_ptr, stride_group, weights_ptr, stride_weights, adv_ptr, kept_ptr,
    lengths_ptr, stride_lengths, moments_ptr, broken_ptr,
    n_responses, n_rewards, norm_eps: tl.float64, snr_threshold: tl.float64,
    HAS_WEIGHTS: tl.constexpr, SUMMED: tl.constexpr, DROP: tl.constexpr, SNR: tl.constexpr,
    WHITEN: tl.constexpr, TOKENS: tl.constexpr, K: tl.constexpr, B: tl.constexpr,
    LONGEST: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Groups that are runs of equal ids: each response walks through its own."""
    KV: tl.constexpr = 1 if SUMMED else K
    offs_k = tl.arange(0, K)
    live_K = offs_k < n_rewards
    weights_K = reward_weights(weights_ptr, stride_weights, offs_k, n_rewards, HAS_WEIGHTS)
    weights_KV = weights_K
    if SUMMED:
        weights_KV = tl.full((1,), 1.0, tl.float64)
    offs_b = tl.program_id(0) * B + tl.arange(0, B)
    own_B = offs_b < n_responses
    group_B = tl.load(group_ptr + offs_b.to(tl.int64) * stride_group, mask=own_B, other=0)
    columns_ptr = rewards_ptr + offs_k.to(tl.int64) * stride_k
    own_BK = reward_values(columns_ptr, stride_r, offs_b, own_B, live_K, weights_K, SUMMED)[0]
    first_B, end_B, met = _run(group_ptr, stride_group, offs_b, own_B, group_B, n_responses, LONGEST, STRIDE)
    tl.store(broken_ptr + tl.program_id(0), met)
    longest = tl.max(end_B - first_B, 0)

    # A column's rewards of the response's run are its first size_BK, one row apart, and NaN behind.
    at_BK = columns_ptr[None, :] + first_B.to(tl.int64)[:, None] * stride_r
    size_BK = tl.where(own_B[:, None] & live_K[None, :], (end_B - first_B)[:, None], 0)
    size_B = tl.max(size_BK, 1)
    WIDE: tl.constexpr = tl.float64 if SUMMED else tl.float32  # of what is normalised
    count_BK = tl.zeros((B, KV), tl.int32)
    start_BK = tl.full((B, KV), float("nan"), WIDE)  # the run's first value, from which deviations are small
    sum_BK = tl.zeros((B, KV), tl.float64)
    square_BK = tl.zeros((B, KV), tl.float64)
    low_BK = tl.full((B, KV), float("inf"), WIDE)
    high_BK = tl.full((B, KV), -float("inf"), WIDE)
    largest_BK = tl.zeros((B, KV), tl.float64)
    for step in tl.range(0, longest):
        value_BK = tl.load(at_BK + step * stride_r, mask=step < size_BK, other=float("nan")).to(WIDE)
        if SUMMED:
            value_BK, more_BK = combined(value_BK, weights_K, SUMMED)
            value_BK = tl.where((step < size_B)[:, None], value_BK, float("nan"))
            largest_BK = tl.maximum(largest_BK, tl.where(value_BK == value_BK, more_BK, 0.0))
        known_BK = value_BK == value_BK
        count_BK += known_BK.to(tl.int32)
        start_BK = tl.where(start_BK == start_BK, start_BK, value_BK)
        deviation_BK = tl.where(known_BK, value_BK.to(tl.float64) - start_BK.to(tl.float64), 0.0)
        sum_BK += deviation_BK
        square_BK += deviation_BK * deviation_BK
        low_BK = tl.where(value_BK < low_BK, value_BK, low_BK)  # not by a NaN
        high_BK = tl.where(value_BK > high_BK, value_BK, high_BK)
    count_BK = count_BK.to(tl.float64)
    low_BK = low_BK.to(tl.float64)
    high_BK = high_BK.to(tl.float64)
    if not SUMMED:
        largest_BK = tl.maximum(tl.abs(low_BK), tl.abs(high_BK))
    from_start_BK = sum_BK / tl.maximum(count_BK, 1.0)
    mean_BK = start_BK.to(tl.float64) + from_start_BK
    m2_BK = tl.maximum(square_BK - sum_BK * from_start_BK, 0.0)
    varied_BK, scale_BK = spread(count_BK, m2_BK, low_BK, high_BK, largest_BK, norm_eps)
    adv_BK = normalised(own_BK, mean_BK, scale_BK, varied_BK)
    adv_B = tl.sum(rounded_product(adv_BK, weights_KV[None, :]), 1)
    kept_B = tl.full((B,), 1, tl.int32)
    if DROP:
        n_kept_B = tl.zeros((B,), tl.int32)
        for step in tl.range(0, longest):
            value_BK = tl.load(at_BK + step * stride_r, mask=step < size_BK, other=float("nan"))
            each_BK = combined(value_BK.to(tl.float64), weights_K, SUMMED)[0]
            each_BK = normalised(each_BK, mean_BK, scale_BK, varied_BK)
            dropped_B = is_dropped(each_BK, weights_KV, snr_threshold, norm_eps, SNR)
            n_kept_B += ((step < size_B) & (dropped_B == 0)).to(tl.int32)
        dropped_B = is_dropped(adv_BK, weights_KV, snr_threshold, norm_eps, SNR)
        kept_B = tl.where(dropped_B, 0, 1)
        share_B = n_kept_B.to(tl.float64) / tl.maximum(size_B, 1).to(tl.float64)
        adv_B = tl.where(dropped_B, 0.0, adv_B * share_B)
        tl.store(kept_ptr + offs_b, kept_B != 0, mask=own_B)
    tl.store(adv_ptr + offs_b, adv_B.to(adv_ptr.dtype.element_ty), mask=own_B)
    if WHITEN:
        store_moments(moments_ptr, adv_B, kept_B, own_B, lengths_ptr, stride_lengths, offs_b, TOKENS)


def unserved(op: str, rewards_RK: Tensor) -> str | None:
    """Why the three operations cannot serve such rewards; None: they can."""
    if op not in SERVED:
        return f"it serves {', '.join(SERVED)}"
    if rewards_RK.dtype not in DTYPES:
        return f"the dtype is {rewards_RK.dtype}, expected one of {DTYPES}"
    if not 1 <= rewards_RK.shape[1] <= MAX_REWARDS:
        return f"K is {rewards_RK.shape[1]}, expected 1 to {MAX_REWARDS}"
    if rewards_RK.shape[0] >= 1 << 30:
        return f"R is {rewards_RK.shape[0]}, expected less than 2^30"
    return None


def advantages(
    rewards_RK: Tensor, group_R: Tensor, options: AdvantageOptions, process_group: Any = None
) -> tuple[Tensor, Tensor | None]:
    """adv_R and, of GD2PO, kept_R. process_group: whitened over all its ranks."""
    op, weights_K = f"{options.kind}_advantages", options.weights_K
    whiten, norm_eps, snr_threshold = options.whiten, options.norm_eps, options.snr_threshold
    summed, drop = options.kind == "grpo", options.kind == "gd2po"
    why_not = unserved(op, rewards_RK)
    if why_not is not None:
        raise ValueError(f"{op}: {why_not}")
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
        arguments = (
            rewards_RK, *rewards_RK.stride(), group_R, group_R.stride(0),
            rewards_RK if weights_K is None else weights_K, 0 if weights_K is None else weights_K.stride(0),
            adv_R, adv_R if kept_R is None else kept_R,
            adv_R if tokens_R is None else tokens_R, 0 if tokens_R is None else tokens_R.stride(0),
            moments_P3, torch.empty(n_programs, dtype=torch.int32, device=device),
            n_responses, n_rewards, float(norm_eps), 0.0 if snr_threshold is None else float(snr_threshold),
        )  # fmt: skip
        variant = {
            "HAS_WEIGHTS": weights_K is not None, "SUMMED": summed, "DROP": drop,
            "SNR": snr_threshold is not None, "WHITEN": whiten is not None, "TOKENS": tokens_R is not None,
            "K": padded, "B": owned,
        }  # fmt: skip
        options_ = {"num_stages": 1, "maxnreg": NO_REGISTER_TARGET, "enable_fp_fusion": True}
        warps = min(max(owned * padded // WARP_TILE, 1), MAX_WARPS)
        _runs_kernel[(n_programs,)](
            *arguments, **variant, LONGEST=LONGEST, STRIDE=STRIDE, num_warps=warps, **options_
        )
        scattered_kernel[(n_programs,)](
            *arguments, **variant, J=TILE // max(padded, 4), SCAN=SCAN_BLOCK, num_warps=4, **options_
        )
    if whiten is not None:
        whiten_(adv_R, kept_R, tokens_R, moments_P3, out_R, norm_eps, process_group)
    return out_R, kept_R
