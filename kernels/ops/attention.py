"""CPU attention without a mask tensor: each piece attends to itself and to a prompt that pieces may share.

The two results are combined by means of their log-sum-exps. All products are in fp32, because bf16 is slow on
many CPUs. On one AVX2 thread, a prompt of 295 tokens with 8 responses of 80 (9 heads of dimension 64) took 55
ms. With a mask it took 136 ms.

Shapes: T positions of a packed batch, H heads, K key-value heads, G = H / K, d head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

Piece = tuple[int, int, int, int]
"""Start and end of the piece's rows, then start and end of its prompt's rows (equal if it has no prompt)."""


def by_halves(
    query_THd: Tensor, key_TKd: Tensor, value_TKd: Tensor, pieces: Sequence[Piece], scale: float | None
) -> Tensor:
    """Compute differentiable causal attention within each piece, and full attention to its prompt.

    Args:
        query_THd, key_TKd, value_TKd: fp32 or bf16 on the CPU. H is a multiple of K.
        pieces: in the order of the rows, all of which they cover. The pieces of one prompt are adjacent.
        scale: factor of the scores. None stands for d ** -0.5.
    Returns:
        (T, H, d) in the queries' dtype.
    """
    return _Halves.apply(query_THd, key_TKd, value_TKd, pieces, scale)


class _Halves(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, pieces: Sequence[Piece], scale: float | None
    ) -> Tensor:
        forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        wide = partial(_wide, kv_heads=key.shape[1], group=query.shape[1] // key.shape[1])
        query_KGTd, key_KGTd, value_KGTd = wide(query), wide(key), wide(value)
        out = torch.empty_like(query, dtype=torch.float32, memory_format=torch.contiguous_format)
        out_KGTd = wide(out)
        lse_KGT = query_KGTd.new_empty(query_KGTd.shape[:3])
        for rows, keys, causal in _halves(pieces):
            half_KGTd, half_KGT = forward(
                query_KGTd[:, :, rows], key_KGTd[:, :, keys], value_KGTd[:, :, keys], 0.0, causal, scale=scale
            )
            if causal:
                out_KGTd[:, :, rows], lse_KGT[:, :, rows] = half_KGTd, half_KGT
                continue
            own_KGT = lse_KGT[:, :, rows]
            whole_KGT = torch.logaddexp(own_KGT, half_KGT)
            out_KGTd[:, :, rows] *= (own_KGT - whole_KGT).exp_()[..., None]
            out_KGTd[:, :, rows].addcmul_(half_KGTd, (half_KGT - whole_KGT).exp_()[..., None])
            lse_KGT[:, :, rows] = whole_KGT
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse_KGT)
        ctx.pieces, ctx.scale = pieces, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        query, key, value, out, lse_KGT = ctx.saved_tensors
        wide = partial(_wide, kv_heads=key.shape[1], group=query.shape[1] // key.shape[1])
        query_KGTd, key_KGTd, value_KGTd = wide(query), wide(key), wide(value)
        grad_out_KGTd, out_KGTd = wide(gradients[0]), wide(out)
        dquery, dkey, dvalue = (out_KGTd.new_empty(x.shape) for x in (query, key, value))
        dquery_KGTd = wide(dquery)
        for rows, keys, causal in _halves(ctx.pieces):
            found = backward(
                grad_out_KGTd[:, :, rows],
                query_KGTd[:, :, rows],
                key_KGTd[:, :, keys],
                value_KGTd[:, :, keys],
                out_KGTd[:, :, rows],
                lse_KGT[:, :, rows],
                0.0,
                causal,
                scale=ctx.scale,
            )
            totals = dquery_KGTd[:, :, rows], dkey[keys].transpose(0, 1), dvalue[keys].transpose(0, 1)
            parts = found[0], found[1].sum(1), found[2].sum(1)
            for total, part in zip(totals, parts, strict=True):
                total.copy_(part) if causal else total.add_(part)
        return dquery.to(query.dtype), dkey.to(key.dtype), dvalue.to(value.dtype), None, None


def _wide(x_TNd: Tensor, kv_heads: int, group: int) -> Tensor:
    """Return (K, G, T, d) in fp32 from x_TNd. N is H, or it is K: then each head is repeated G times."""
    x_TKGd = x_TNd.float().unflatten(1, (kv_heads, -1)).expand(-1, -1, group, -1)
    return x_TKGd.permute(1, 2, 0, 3)


def _halves(pieces: Sequence[Piece]) -> Iterator[tuple[slice, slice, bool]]:
    """Yield (rows, keys, causal). Per prompt: each piece with itself, then all pieces with the prompt."""
    for (begin, end), members in groupby(pieces, key=lambda piece: piece[2:]):
        unit = list(members)
        for first, last, *_ in unit:
            rows = slice(first, last)
            yield rows, rows, True
        if begin < end:
            yield slice(unit[0][0], unit[-1][1]), slice(begin, end), False
