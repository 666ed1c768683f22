"""Attention of pieces on a CPU, without a mask: a piece attends to itself and to the prompt it shares.

The halves are joined by their log-sum-exp; the backward of each is exact with the output and log-sum-exp of
the whole. Computed in fp32 (bfloat16 products are slow on many CPUs) from inputs in their own dtype.

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
"""Where its rows begin and end, and those of the prompt that it also sees (equal where there is none)."""


def by_halves(
    query_THd: Tensor, key_TKd: Tensor, value_TKd: Tensor, pieces: Sequence[Piece], scale: float | None
) -> Tensor:
    """Causal attention of each piece to itself, behind all of its prompt; differentiable.

    Args:
        query_THd, key_TKd, value_TKd: fp32 or bf16 on the CPU; K divides H.
        pieces: in order, every row in one; those of one prompt stand together, without rows between them.
        scale: of the scores; None is d ** -0.5.
    Returns:
        (T, H, d) in the queries' dtype.
    """
    out: Tensor = _Halves.apply(query_THd, key_TKd, value_TKd, pieces, scale)
    return out


class _Halves(torch.autograd.Function):
    """Keeps its inputs, its output and one log-sum-exp a query and head."""

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
        of_query, of_key, of_value = (out_KGTd.new_empty(x.shape) for x in (query, key, value))
        of_query_KGTd = wide(of_query)
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
            places = of_query_KGTd[:, :, rows], of_key[keys].transpose(0, 1), of_value[keys].transpose(0, 1)
            sums = found[0], found[1].sum(1), found[2].sum(1)
            for place, part in zip(places, sums, strict=True):
                place.copy_(part) if causal else place.add_(part)
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), None, None


def _wide(x_TNd: Tensor, kv_heads: int, group: int) -> Tensor:
    """(K, G, T, d) fp32 of (T, H, d), or of (T, K, d) whose heads then stand G times; a view of fp32."""
    x_TKGd = x_TNd.float().unflatten(1, (kv_heads, -1)).expand(-1, -1, group, -1)
    return x_TKGd.permute(1, 2, 0, 3)


def _halves(pieces: Sequence[Piece]) -> Iterator[tuple[slice, slice, bool]]:
    """Rows, the keys that they see, and whether causally: each piece itself, then those of a prompt it."""
    for (begin, end), members in groupby(pieces, key=lambda piece: piece[2:]):
        unit = list(members)
        for first, last, *_ in unit:
            rows = slice(first, last)
            yield rows, rows, True
        if begin < end:
            yield slice(unit[0][0], unit[-1][1]), slice(begin, end), False
