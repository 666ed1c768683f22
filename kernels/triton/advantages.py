"""GRPO, GDPO and GD2PO advantages on the GPU, whitened, in one launch.

Groups are found by comparing ids, in any order and of any size. A program owns some responses. It looks once
through all ids for the stretch that can hold its groups' members (the ids between its lowest and highest:
where groups lie side by side a few rows, always exact), then takes its groups one after the other over that
stretch. No sum is atomic: each has one order. fp64 throughout, as the reference.

Whitening needs every response: the program that ends last does it (smopd.kernels.triton.whiten).

Shapes: R responses, K rewards (1 in GRPO: their weighted sum). In kernels: B responses that a program owns,
J responses of a block of the stretch, K padded to a power of two.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from smopd.kernels.triton.mixture import NO_REGISTER_TARGET
from smopd.kernels.triton.whiten import WHITEN_BLOCK, is_last, moments_of, store_whitened, whiten_by_ranks
from smopd.kernels.types import CONFLICT_FLOOR, EQUAL_ULPS, AdvantageOptions

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SERVED = ("grpo_advantages", "gdpo_advantages", "gd2po_advantages")
MAX_REWARDS = 32
OWNED = 64  # responses of a program, at most
TILE = 512  # responses times rewards held at a time
SCAN_BLOCK = 2048

_INT64_MAX = tl.constexpr(2**63 - 1)
_INT64_MIN = tl.constexpr(-(2**63))
_EQUAL_WITHIN = tl.constexpr(EQUAL_ULPS * torch.finfo(torch.float32).eps)
_CONFLICT_FLOOR = tl.constexpr(CONFLICT_FLOOR)


@triton.jit
def _weights(weights_ptr, stride_weights, offs_k, n_rewards, HAS_WEIGHTS: tl.constexpr):
    if HAS_WEIGHTS:
        return tl.load(weights_ptr + offs_k * stride_weights, mask=offs_k < n_rewards, other=0.0).to(
            tl.float64
        )
    else:
        return tl.where(offs_k < n_rewards, 1.0, 0.0).to(tl.float64)


@triton.jit
def _values(columns_ptr, stride_r, rows_J, inside_J, live_K, weights_K, SUMMED: tl.constexpr):
    """What is normalised and the size it was computed from, (J, K), or (J, 1) if SUMMED; NaN: none there."""
    at_JK = columns_ptr[None, :] + rows_J.to(tl.int64)[:, None] * stride_r
    inside_JK = inside_J[:, None] & live_K[None, :]
    value_JK = tl.load(at_JK, mask=inside_JK, other=float("nan")).to(tl.float64)
    size_JK = tl.abs(value_JK)
    if SUMMED:
        # A reward of weight 0 plays no part, not even by being NaN.
        terms_JK = tl.where(weights_K[None, :] != 0.0, weights_K[None, :] * value_JK, 0.0)
        value_JK = tl.sum(terms_JK, 1)[:, None]
        size_JK = tl.sum(tl.abs(terms_JK), 1)[:, None]
    return value_JK, size_JK


@triton.jit
def _merge_moments(count, mean, m2, more_count, more_mean, more_m2):
    """Chan's rule."""
    total = count + more_count
    share = more_count / tl.maximum(total, 1.0)
    step = more_mean - mean
    return total, mean + step * share, m2 + more_m2 + step * step * count * share


@triton.jit
def _normalise(value_JK, mean_K, scale_K, varied_K):
    """Eq. 1; 0 for a NaN and where the group's values are equal."""
    adv_JK = (value_JK - mean_K[None, :]) / scale_K[None, :]
    return tl.where((value_JK == value_JK) & varied_K[None, :], adv_JK, 0.0)


@triton.jit
def _is_dropped(adv_JK, weights_K, snr_threshold, norm_eps, SNR: tl.constexpr):
    """Whether GD2PO drops a response: its rewards pull in opposite directions."""
    parts_JK = adv_JK * weights_K[None, :]
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
def _group_kernel(
    rewards_ptr, stride_r, stride_k, group_ptr, stride_group, weights_ptr, stride_weights, adv_ptr, kept_ptr,
    lengths_ptr, stride_lengths, counter_ptr, moments_ptr, out_ptr,
    n_responses, n_rewards, norm_eps: tl.float64, snr_threshold: tl.float64,
    HAS_WEIGHTS: tl.constexpr, SUMMED: tl.constexpr, DROP: tl.constexpr, SNR: tl.constexpr,
    WHITEN: tl.constexpr, TOKENS: tl.constexpr, RANKS: tl.constexpr, WB: tl.constexpr,
    K: tl.constexpr, B: tl.constexpr, J: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    KV: tl.constexpr = 1 if SUMMED else K
    offs_k = tl.arange(0, K)
    offs_j = tl.arange(0, J)
    weights_K = _weights(weights_ptr, stride_weights, offs_k, n_rewards, HAS_WEIGHTS)
    weights_KV = weights_K
    if SUMMED:
        weights_KV = tl.full((1,), 1.0, tl.float64)
    offs_b = tl.program_id(0) * B + tl.arange(0, B)
    own_B = offs_b < n_responses
    group_B = tl.load(group_ptr + offs_b.to(tl.int64) * stride_group, mask=own_B, other=0)
    columns_ptr = rewards_ptr + offs_k.to(tl.int64) * stride_k
    live_K = offs_k < n_rewards
    own_BK = _values(columns_ptr, stride_r, offs_b, own_B, live_K, weights_K, SUMMED)[0]
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
                value_JK, size_JK = _values(
                    columns_ptr, stride_r, rows_J, member_J, live_K, weights_K, SUMMED
                )
                known_JK = member_J[:, None] & (value_JK == value_JK)
                value_JK = tl.where(known_JK, value_JK, 0.0)
                more_K = tl.sum(known_JK.to(tl.float64), 0)
                more_mean_K = tl.sum(value_JK, 0) / tl.maximum(more_K, 1.0)
                centred_JK = tl.where(known_JK, value_JK - more_mean_K[None, :], 0.0)
                more_m2_K = tl.sum(centred_JK * centred_JK, 0)
                count_K, mean_K, m2_K = _merge_moments(count_K, mean_K, m2_K, more_K, more_mean_K, more_m2_K)
                low_K = tl.minimum(low_K, tl.min(tl.where(known_JK, value_JK, float("inf")), 0))
                high_K = tl.maximum(high_K, tl.max(tl.where(known_JK, value_JK, -float("inf")), 0))
                size_K = tl.maximum(size_K, tl.max(tl.where(known_JK, size_JK, 0.0), 0))
                members += found
        varied_K = (count_K > 1.0) & (high_K - low_K > size_K * _EQUAL_WITHIN)
        scale_K = tl.where(varied_K, tl.sqrt(m2_K / tl.maximum(count_K - 1.0, 1.0)) + norm_eps, 1.0)
        adv_BK = _normalise(own_BK, mean_K, scale_K, varied_K)
        group_adv_B = tl.sum(adv_BK * weights_KV[None, :], 1)
        if DROP:
            n_kept = tl.zeros((), tl.float64)
            for start in tl.range(first, last + 1, J):
                rows_J = start + offs_j
                member_J = _members(group_ptr, stride_group, rows_J, last, group)
                if tl.sum(member_J.to(tl.int32), 0) > 0:
                    adv_JK = _values(columns_ptr, stride_r, rows_J, member_J, live_K, weights_K, SUMMED)[0]
                    adv_JK = _normalise(adv_JK, mean_K, scale_K, varied_K)
                    dropped_J = _is_dropped(adv_JK, weights_KV, snr_threshold, norm_eps, SNR)
                    n_kept += tl.sum((member_J & (dropped_J == 0)).to(tl.int32), 0)
            dropped_B = mine_B & _is_dropped(adv_BK, weights_KV, snr_threshold, norm_eps, SNR)
            kept_B = tl.where(dropped_B, 0, kept_B)
            group_adv_B = tl.where(dropped_B, 0.0, group_adv_B * (n_kept / members))
        adv_B = tl.where(mine_B, group_adv_B, adv_B)
        todo_B = tl.where(mine_B, 0, todo_B)
        left = tl.sum(todo_B, 0)
    tl.store(adv_ptr + offs_b, adv_B.to(adv_ptr.dtype.element_ty), mask=own_B)
    if DROP:
        tl.store(kept_ptr + offs_b, kept_B != 0, mask=own_B)
    if WHITEN:  # noqa: SIM102  the outer one is compiled away
        if is_last(counter_ptr):
            count, mean, m2 = moments_of(
                adv_ptr, kept_ptr, lengths_ptr, stride_lengths, n_responses, TOKENS, DROP, WB
            )
            if RANKS:
                tl.store(moments_ptr, count)
                tl.store(moments_ptr + 1, mean)
                tl.store(moments_ptr + 2, m2)
            else:
                store_whitened(
                    adv_ptr, kept_ptr, lengths_ptr, stride_lengths, out_ptr, n_responses, count, mean, m2,
                    norm_eps, TOKENS, DROP, WB,
                )  # fmt: skip


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
    counter = out_R if whiten is None else torch.zeros(1, dtype=torch.int32, device=device)
    tokens_R = options.lengths_R if whiten == "tokens" else None
    table_W3 = None
    if whiten is not None and process_group is not None:
        world = torch.distributed.get_world_size(process_group)
        table_W3 = torch.zeros(world, 3, dtype=torch.float64, device=device)
    if n_responses > 0:
        padded = triton.next_power_of_2(n_rewards)
        owned = min(OWNED, TILE // padded)
        _group_kernel[(triton.cdiv(n_responses, owned),)](
            rewards_RK, *rewards_RK.stride(), group_R, group_R.stride(0),
            rewards_RK if weights_K is None else weights_K, 0 if weights_K is None else weights_K.stride(0),
            adv_R, adv_R if kept_R is None else kept_R,
            adv_R if tokens_R is None else tokens_R, 0 if tokens_R is None else tokens_R.stride(0), counter,
            adv_R if table_W3 is None else table_W3[torch.distributed.get_rank(process_group)], out_R,
            n_responses, n_rewards, float(norm_eps), 0.0 if snr_threshold is None else float(snr_threshold),
            HAS_WEIGHTS=weights_K is not None, SUMMED=summed, DROP=drop, SNR=snr_threshold is not None,
            WHITEN=whiten is not None, TOKENS=tokens_R is not None, RANKS=table_W3 is not None,
            WB=WHITEN_BLOCK, K=padded, B=owned, J=TILE // max(padded, 4), SCAN=SCAN_BLOCK,
            num_warps=4, num_stages=1, maxnreg=NO_REGISTER_TARGET,
        )  # fmt: skip
    if table_W3 is not None:
        whiten_by_ranks(adv_R, kept_R, tokens_R, table_W3, out_R, norm_eps, process_group)
    return out_R, kept_R
