"""Sampling of one token per row (see reference/topk.py).

The first launch stores the maximum and the sum of exponentials of each part of a row. The second launch finds
the part with the sampled token and reads only this part again.

Shapes: R rows, V vocabulary, P parts of a row, B tokens of a part.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_V = 2048  # tokens of a part, which makes 75 parts at V 151,936
BELOW_ONE = tl.constexpr(1 - 2.0**-53)


@triton.jit
def _parts_kernel(logits_ptr, stride_r, stats_ptr, n_vocab, n_parts, temperature, BLOCK_V: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    row, part = pid // n_parts, pid % n_parts
    offs_v = part * BLOCK_V + tl.arange(0, BLOCK_V)
    x_B = tl.load(logits_ptr + row * stride_r + offs_v, mask=offs_v < n_vocab, other=float("-inf"))
    x_B = x_B.to(tl.float32) / temperature
    top = tl.max(x_B, 0)
    mass = tl.sum(tl.exp(x_B - tl.where(top == float("-inf"), 0.0, top)), 0)
    tl.store(stats_ptr + (2 * row) * n_parts + part, top)
    tl.store(stats_ptr + (2 * row + 1) * n_parts + part, mass)


@triton.jit
def _passes(mass_B, offs_b, cumulative_B, aim, SIZE: tl.constexpr):
    """Return the first index whose cumulative mass exceeds `aim`, or else the last index with any mass."""
    first = tl.min(tl.where((cumulative_B > aim) & (mass_B > 0), offs_b, SIZE), 0)
    last = tl.max(tl.where(mass_B > 0, offs_b, 0), 0)
    return tl.where(first == SIZE, last, first)


@triton.jit
def _choose_kernel(
    logits_ptr, stride_r, stats_ptr, uniform_ptr, token_ptr, logp_ptr, n_vocab, n_parts, temperature,
    BLOCK_P: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offs_p = tl.arange(0, BLOCK_P)
    inside_P = offs_p < n_parts
    top_P = tl.load(stats_ptr + (2 * row) * n_parts + offs_p, mask=inside_P, other=float("-inf"))
    sum_P = tl.load(stats_ptr + (2 * row + 1) * n_parts + offs_p, mask=inside_P, other=0.0)
    top = tl.max(top_P, 0)
    mass_P = sum_P.to(tl.float64) * tl.exp((top_P - top).to(tl.float64))
    cumulative_P = tl.cumsum(mass_P, 0)
    total = tl.max(cumulative_P, 0)
    aim = tl.minimum(tl.load(uniform_ptr + row), BELOW_ONE) * total
    part = _passes(mass_P, offs_p, cumulative_P, aim, BLOCK_P)
    before = tl.sum(tl.where(offs_p < part, mass_P, 0.0), 0)

    offs_b = tl.arange(0, BLOCK_V)
    offs_v = part * BLOCK_V + offs_b
    x_B = tl.load(logits_ptr + row * stride_r + offs_v, mask=offs_v < n_vocab, other=float("-inf"))
    x_B = x_B.to(tl.float32) / temperature
    mass_B = tl.exp(x_B - top).to(tl.float64)
    place = _passes(mass_B, offs_b, before + tl.cumsum(mass_B, 0), aim, BLOCK_V)
    x = tl.sum(tl.where(offs_b == place, x_B, 0.0), 0)
    tl.store(token_ptr + row, (part * BLOCK_V + place).to(tl.int64))
    tl.store(logp_ptr + row, x - top - tl.log(total).to(tl.float32))


def draw(logits_RV: Tensor, temperature: float, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
    n_rows, n_vocab = logits_RV.shape
    n_parts = triton.cdiv(n_vocab, BLOCK_V)
    stats = torch.empty(n_rows, 2, n_parts, dtype=torch.float32, device=logits_RV.device)
    token_R = torch.empty(n_rows, dtype=torch.int64, device=logits_RV.device)
    logp_R = torch.empty(n_rows, dtype=torch.float32, device=logits_RV.device)
    stride_r = logits_RV.stride(0)
    _parts_kernel[(n_rows * n_parts,)](
        logits_RV, stride_r, stats, n_vocab, n_parts, temperature, BLOCK_V=BLOCK_V, enable_fp_fusion=True
    )
    _choose_kernel[(n_rows,)](
        logits_RV, stride_r, stats, uniform_R.contiguous(), token_R, logp_R, n_vocab, n_parts, temperature,
        BLOCK_P=triton.next_power_of_2(n_parts), BLOCK_V=BLOCK_V, enable_fp_fusion=True,
    )  # fmt: skip
    return token_R, logp_R
