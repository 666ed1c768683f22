"""Whitening of advantages (Eq. 3) in fp64, from moments that each program stored in a slot.

Every program merges all slots by Chan's rule in the same order. So no atomics are needed, and repeated runs
give equal bits. With several ranks, a launch merges the slots of each rank, and an all-reduce collects the
results.

Shapes: R responses, P slots, W ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from smopd.kernels.triton.mixture import NO_REGISTER_TARGET
from smopd.kernels.types import TOKEN_VAR_EPS

WHITEN_BLOCK = 256  # responses per program
SLOT_BLOCK = 512  # slots merged at a time
_OPTIONS = {"num_warps": 4, "num_stages": 1, "maxnreg": NO_REGISTER_TARGET, "enable_fp_fusion": True}

_TOKEN_VAR_EPS = tl.constexpr(TOKEN_VAR_EPS)


@triton.jit
def rounded_product(a, b):
    """Return a * b, rounded before it enters a sum over threads.

    A plain product could be fused into the sum. Then the sums of different threads would be rounded
    differently, and any of them may be stored.
    """
    return tl.fma(a, b, 0.0)


@triton.jit
def merge_moments(count, mean, m2, more_count, more_mean, more_m2):
    """Merge two sets of moments by Chan's rule."""
    total = count + more_count
    share = more_count / tl.maximum(total, 1.0)
    step = more_mean - mean
    return total, mean + step * share, m2 + more_m2 + step * step * count * share


@triton.jit
def store_moments(
    moments_ptr, adv_B, kept_B, own_B, lengths_ptr, stride_lengths, offs_b, TOKENS: tl.constexpr
):
    """Store the number, mean and sum of squared deviations of this program's samples in its slot."""
    counted_B = own_B & (kept_B != 0)
    count_B = counted_B.to(tl.float64)
    if TOKENS:
        lengths_ptr += offs_b.to(tl.int64) * stride_lengths
        count_B = tl.where(counted_B, tl.load(lengths_ptr, mask=own_B, other=0).to(tl.float64), 0.0)
    count = tl.sum(count_B, 0)
    mean = tl.sum(rounded_product(count_B, adv_B), 0) / tl.maximum(count, 1.0)
    slot_ptr = moments_ptr + tl.program_id(0) * 3
    tl.store(slot_ptr, count)
    tl.store(slot_ptr + 1, mean)
    tl.store(slot_ptr + 2, tl.sum(rounded_product(count_B * (adv_B - mean), adv_B - mean), 0))


@triton.jit
def _merged(moments_ptr, n_slots, BLOCK: tl.constexpr):
    count = tl.zeros((), tl.float64)
    mean = tl.zeros((), tl.float64)
    m2 = tl.zeros((), tl.float64)
    for start in tl.range(0, n_slots, BLOCK):
        offs_p = start + tl.arange(0, BLOCK)
        inside_P = offs_p < n_slots
        count_P = tl.load(moments_ptr + offs_p * 3, mask=inside_P, other=0.0)
        mean_P = tl.load(moments_ptr + offs_p * 3 + 1, mask=inside_P, other=0.0)
        m2_P = tl.load(moments_ptr + offs_p * 3 + 2, mask=inside_P, other=0.0)
        more = tl.sum(count_P, 0)
        more_mean = tl.sum(rounded_product(count_P, mean_P), 0) / tl.maximum(more, 1.0)
        more_m2 = tl.sum(m2_P + count_P * (mean_P - more_mean) * (mean_P - more_mean), 0)
        count, mean, m2 = merge_moments(count, mean, m2, more, more_mean, more_m2)
    return count, mean, m2


@triton.jit
def _merge_kernel(moments_ptr, out_ptr, n_slots, SLOTS: tl.constexpr):
    count, mean, m2 = _merged(moments_ptr, n_slots, SLOTS)
    tl.store(out_ptr, count)
    tl.store(out_ptr + 1, mean)
    tl.store(out_ptr + 2, m2)


@triton.jit
def _samples(
    adv_ptr, kept_ptr, lengths_ptr, stride_lengths, offs_r, n_responses,
    TOKENS: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    """Load the advantages and each one's number of samples, which is 0 for an infinite advantage."""
    inside_R = offs_r < n_responses
    adv_R = tl.load(adv_ptr + offs_r, mask=inside_R, other=0.0)
    count_R = inside_R.to(tl.float64)
    if TOKENS:
        lengths_ptr += offs_r.to(tl.int64) * stride_lengths
        count_R = tl.load(lengths_ptr, mask=inside_R, other=0).to(tl.float64)
    if DROP:
        kept_R = tl.load(kept_ptr + offs_r, mask=inside_R, other=0)
        count_R = tl.where(kept_R != 0, count_R, 0.0)
    return adv_R, tl.where(adv_R == float("inf"), 0.0, count_R)


@triton.jit
def _whiten_kernel(
    adv_ptr, kept_ptr, lengths_ptr, stride_lengths, moments_ptr, out_ptr, n_responses, n_slots,
    norm_eps: tl.float64,
    TOKENS: tl.constexpr, DROP: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offs_r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    adv_R, count_R = _samples(
        adv_ptr, kept_ptr, lengths_ptr, stride_lengths, offs_r, n_responses, TOKENS, DROP
    )
    count, mean, m2 = _merged(moments_ptr, n_slots, SLOTS)
    variance = m2 / tl.maximum(count - 1.0, 1.0)
    if TOKENS:
        scale = tl.sqrt(variance + _TOKEN_VAR_EPS)
    else:
        # With variance 0, the numerator is 0, too.
        scale = tl.sqrt(variance) + norm_eps
        scale = tl.where(scale > 0.0, scale, 1.0)
    white_R = tl.where(count_R > 0.0, tl.where(count > 1.0, (adv_R - mean) / scale, 0.0), 0.0)
    tl.store(out_ptr + offs_r, white_R.to(tl.float32), mask=offs_r < n_responses)


def whiten_(
    adv_R: Tensor,
    kept_R: Tensor | None,
    lengths_R: Tensor | None,
    moments_P3: Tensor,
    out_R: Tensor,
    norm_eps: float,
    process_group: Any = None,
) -> None:
    """Whiten the fp64 adv_R into out_R. adv_R is infinite for a response that no reward scored.

    lengths_R: samples of each response (None: 1). moments_P3: number, mean and sum of squared deviations of
    disjoint parts of the samples. process_group: ranks to whiten over.
    """
    n_responses, n_slots = adv_R.shape[0], moments_P3.shape[0]
    if process_group is not None:
        world = torch.distributed.get_world_size(process_group)
        table_W3 = torch.zeros(world, 3, dtype=torch.float64, device=adv_R.device)
        if n_responses > 0:
            own = table_W3[torch.distributed.get_rank(process_group)]
            _merge_kernel[(1,)](moments_P3, own, n_slots, SLOTS=SLOT_BLOCK, **_OPTIONS)
        torch.distributed.all_reduce(table_W3, group=process_group)
        moments_P3, n_slots = table_W3, world
    if n_responses > 0:
        _whiten_kernel[(triton.cdiv(n_responses, WHITEN_BLOCK),)](
            adv_R, adv_R if kept_R is None else kept_R,
            adv_R if lengths_R is None else lengths_R, 0 if lengths_R is None else lengths_R.stride(0),
            moments_P3, out_R, n_responses, n_slots, float(norm_eps),
            TOKENS=lengths_R is not None, DROP=kept_R is not None, SLOTS=SLOT_BLOCK, BLOCK=WHITEN_BLOCK,
            **_OPTIONS,
        )  # fmt: skip
