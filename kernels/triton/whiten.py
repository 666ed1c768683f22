"""Whitening of advantages on the GPU (Eq. 3), by the program of the groups' launch that ends last.

Each program counts itself in when its advantages are stored; the one that finds all others there whitens the
whole batch. The counter orders memory and is no sum: which program comes last changes no number. Across ranks
that program stores this rank's moments, and a second launch whitens behind an all-reduce. fp64 throughout.

Shapes: R responses, W ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from smopd.kernels.types import TOKEN_VAR_EPS

WHITEN_BLOCK = 1024

_TOKEN_VAR_EPS = tl.constexpr(TOKEN_VAR_EPS)


@triton.jit
def is_last(counter_ptr):
    """Whether all other programs of this launch have stored what they stored before this call."""
    tl.debug_barrier()
    return tl.atomic_add(counter_ptr, 1) == tl.num_programs(0) - 1


@triton.jit
def _samples(
    adv_ptr, kept_ptr, lengths_ptr, stride_lengths, offs_r, n_responses,
    TOKENS: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    """Advantages and the samples each stands for."""
    inside_R = offs_r < n_responses
    adv_R = tl.load(adv_ptr + offs_r, mask=inside_R, other=0.0)
    count_R = inside_R.to(tl.float64)
    if TOKENS:
        lengths_ptr += offs_r.to(tl.int64) * stride_lengths
        count_R = tl.load(lengths_ptr, mask=inside_R, other=0).to(tl.float64)
    if DROP:
        kept_R = tl.load(kept_ptr + offs_r, mask=inside_R, other=0)
        count_R = tl.where(kept_R != 0, count_R, 0.0)
    return adv_R, count_R


@triton.jit
def moments_of(
    adv_ptr, kept_ptr, lengths_ptr, stride_lengths, n_responses,
    TOKENS: tl.constexpr, DROP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Number, mean and sum of squared deviations of the samples."""
    offs = tl.arange(0, BLOCK)
    count_R = tl.zeros((BLOCK,), tl.float64)
    total_R = tl.zeros((BLOCK,), tl.float64)
    for start in tl.range(0, n_responses, BLOCK):
        adv_R, more_R = _samples(
            adv_ptr, kept_ptr, lengths_ptr, stride_lengths, start + offs, n_responses, TOKENS, DROP
        )
        count_R += more_R
        total_R += more_R * adv_R
    count = tl.sum(count_R, 0)
    mean = tl.sum(total_R, 0) / tl.maximum(count, 1.0)
    m2_R = tl.zeros((BLOCK,), tl.float64)
    for start in tl.range(0, n_responses, BLOCK):
        adv_R, more_R = _samples(
            adv_ptr, kept_ptr, lengths_ptr, stride_lengths, start + offs, n_responses, TOKENS, DROP
        )
        m2_R += more_R * (adv_R - mean) * (adv_R - mean)
    return count, mean, tl.sum(m2_R, 0)


@triton.jit
def store_whitened(
    adv_ptr, kept_ptr, lengths_ptr, stride_lengths, out_ptr, n_responses, count, mean, m2, norm_eps,
    TOKENS: tl.constexpr, DROP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offs = tl.arange(0, BLOCK)
    variance = m2 / tl.maximum(count - 1.0, 1.0)
    if TOKENS:
        scale = tl.sqrt(variance + _TOKEN_VAR_EPS)
    else:
        # Only an all-equal batch has variance 0, and then the numerator is 0 too.
        scale = tl.sqrt(variance) + norm_eps
        scale = tl.where(scale > 0.0, scale, 1.0)
    for start in tl.range(0, n_responses, BLOCK):
        adv_R, more_R = _samples(
            adv_ptr, kept_ptr, lengths_ptr, stride_lengths, start + offs, n_responses, TOKENS, DROP
        )
        white_R = tl.where(more_R > 0.0, tl.where(count > 1.0, (adv_R - mean) / scale, 0.0), 0.0)
        tl.store(out_ptr + start + offs, white_R.to(tl.float32), mask=start + offs < n_responses)


@triton.jit
def _ranks_kernel(
    adv_ptr, kept_ptr, lengths_ptr, stride_lengths, moments_ptr, out_ptr, n_responses, n_ranks,
    norm_eps: tl.float64,
    TOKENS: tl.constexpr, DROP: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Whitens by the moments of all ranks."""
    offs_w = tl.arange(0, W)
    count_W = tl.load(moments_ptr + offs_w * 3, mask=offs_w < n_ranks, other=0.0)
    mean_W = tl.load(moments_ptr + offs_w * 3 + 1, mask=offs_w < n_ranks, other=0.0)
    m2_W = tl.load(moments_ptr + offs_w * 3 + 2, mask=offs_w < n_ranks, other=0.0)
    count = tl.sum(count_W, 0)
    mean = tl.sum(count_W * mean_W, 0) / tl.maximum(count, 1.0)
    m2 = tl.sum(m2_W + count_W * (mean_W - mean) * (mean_W - mean), 0)
    store_whitened(
        adv_ptr, kept_ptr, lengths_ptr, stride_lengths, out_ptr, n_responses, count, mean, m2, norm_eps,
        TOKENS, DROP, BLOCK,
    )  # fmt: skip


def whiten_by_ranks(
    adv_R: Tensor,
    kept_R: Tensor | None,
    lengths_R: Tensor | None,
    table_W3: Tensor,
    out_R: Tensor,
    norm_eps: float,
    process_group: Any,
) -> None:
    """Writes `adv_R`, whitened over all ranks, to `out_R`.

    Args:
        adv_R: (R,) fp64.
        kept_R: (R,) bool, or None: all of them.
        lengths_R: (R,) response tokens that each stands for, or None: one each.
        table_W3: (W, 3) fp64: this rank's number, mean and sum of squares in its row, 0 elsewhere.
        out_R: (R,) fp32.
    """
    torch.distributed.all_reduce(table_W3, group=process_group)
    n_responses, n_ranks = adv_R.shape[0], table_W3.shape[0]
    if n_responses > 0:
        _ranks_kernel[(1,)](
            adv_R, adv_R if kept_R is None else kept_R,
            adv_R if lengths_R is None else lengths_R, 0 if lengths_R is None else lengths_R.stride(0),
            table_W3, out_R, n_responses, n_ranks, float(norm_eps),
            TOKENS=lengths_R is not None, DROP=kept_R is not None,
            W=triton.next_power_of_2(n_ranks), BLOCK=WHITEN_BLOCK, num_warps=4, num_stages=1,
        )  # fmt: skip
