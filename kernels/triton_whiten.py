"""Whitening of advantages on the GPU (Eq. 3): one launch of one program over the whole batch.

Across ranks an all-reduce of (n, mean, M2) stands between its two halves. fp64 throughout, no atomics.

Shapes: R responses, W ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from smopd.kernels.reference_advantages import TOKEN_VAR_EPS

WHITEN_BLOCK = 4096

_TOKEN_VAR_EPS = tl.constexpr(TOKEN_VAR_EPS)


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
def _whiten_kernel(
    adv_ptr, kept_ptr, lengths_ptr, stride_lengths, moments_ptr, out_ptr, n_responses, n_ranks,
    norm_eps: tl.float64,
    TOKENS: tl.constexpr, DROP: tl.constexpr, SUM: tl.constexpr, APPLY: tl.constexpr,
    W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """SUM: this rank's moments (stored unless APPLY). APPLY: whiten, by these or by the ranks' in a table."""
    offs = tl.arange(0, BLOCK)
    if SUM:
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
        m2 = tl.sum(m2_R, 0)
        if not APPLY:
            tl.store(moments_ptr, count)
            tl.store(moments_ptr + 1, mean)
            tl.store(moments_ptr + 2, m2)
    else:
        offs_w = tl.arange(0, W)
        count_W = tl.load(moments_ptr + offs_w * 3, mask=offs_w < n_ranks, other=0.0)
        mean_W = tl.load(moments_ptr + offs_w * 3 + 1, mask=offs_w < n_ranks, other=0.0)
        m2_W = tl.load(moments_ptr + offs_w * 3 + 2, mask=offs_w < n_ranks, other=0.0)
        count = tl.sum(count_W, 0)
        mean = tl.sum(count_W * mean_W, 0) / tl.maximum(count, 1.0)
        m2 = tl.sum(m2_W + count_W * (mean_W - mean) * (mean_W - mean), 0)
    if APPLY:
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


def whiten(
    adv_R: Tensor,
    kept_R: Tensor | None,
    lengths_R: Tensor | None,
    out_R: Tensor,
    norm_eps: float,
    process_group: Any,
) -> None:
    """Writes `adv_R`, whitened, to `out_R`.

    Args:
        adv_R: (R,) fp64.
        kept_R: (R,) bool, or None: all of them.
        lengths_R: (R,) response tokens that each stands for, or None: one each.
        out_R: (R,) fp32.
        process_group: whitens over all of its ranks; None is this rank alone.
    """
    n_responses = adv_R.shape[0]

    def launch(moments: Tensor, n_ranks: int, *, SUM: bool, APPLY: bool) -> None:
        if n_responses > 0:
            _whiten_kernel[(1,)](
                adv_R, adv_R if kept_R is None else kept_R,
                adv_R if lengths_R is None else lengths_R, 0 if lengths_R is None else lengths_R.stride(0),
                moments, out_R, n_responses, n_ranks, float(norm_eps),
                TOKENS=lengths_R is not None, DROP=kept_R is not None, SUM=SUM, APPLY=APPLY,
                W=triton.next_power_of_2(n_ranks), BLOCK=WHITEN_BLOCK, num_warps=16, num_stages=1,
            )  # fmt: skip

    if process_group is None:
        launch(adv_R, 1, SUM=True, APPLY=True)
        return
    world = torch.distributed.get_world_size(process_group)
    table_W3 = torch.zeros(world, 3, dtype=torch.float64, device=adv_R.device)
    launch(table_W3[torch.distributed.get_rank(process_group)], world, SUM=True, APPLY=False)
    torch.distributed.all_reduce(table_W3, group=process_group)
    launch(table_W3, world, SUM=False, APPLY=True)
