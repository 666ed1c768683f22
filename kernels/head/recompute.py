"""The linear loss that keeps no logits: sums from tiles (rows x piece), the tiles again in backward.

A piece of the weight meets all tokens at once where they fit, so its gradient is one GEMM into its place,
without a sum over chunks beside it. Four GEMMs in all.

Shapes: N tokens, D hidden, V vocabulary (this rank's part), P a piece of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from smopd.kernels.head.chunks import ROW_UNIT_CPU, Gradients, Job, chunk_budget, outputs, steps
from smopd.kernels.head.gemm import hidden_gradient_into, logits_buffer, logits_into, weight_gradient_into
from smopd.kernels.head.tiles import Merged, Plan, finish, over_shards, scaled_pulls
from smopd.kernels.types import TokenTerms, compute_dtype

MIN_PIECE, PIECE_UNIT = 1024, 64  # columns of a tile


@dataclass(frozen=True)
class Tiles:
    """Blocks of rows and pieces of the vocabulary, and a buffer for the largest tile."""

    rows: list[tuple[int, int]]
    pieces: list[tuple[int, int]]
    buffer_NP: Tensor

    def logits(
        self, hidden_ND: Tensor, weight_PD: Tensor, bias_V: Tensor | None, first: int, stop: int
    ) -> Tensor:
        """The tile of these hidden states and weight rows; bias_V is the whole one."""
        tile_NP = self.buffer_NP[: hidden_ND.shape[0], : stop - first]
        logits_into(tile_NP, hidden_ND, weight_PD, None if bias_V is None else bias_V[first:stop])
        return tile_NP


def _tiles(hidden_ND: Tensor, n_vocab: int, chunk_bytes: int | None) -> Tiles:
    n_rows = hidden_ND.shape[0]
    elements = chunk_budget(hidden_ND, chunk_bytes, recompute=True) // hidden_ND.element_size()
    width = max(elements // max(n_rows, 1), MIN_PIECE)
    pieces = list(steps(n_vocab, width, PIECE_UNIT))
    widest = max(stop - start for start, stop in pieces)
    rows = list(steps(n_rows, elements // widest, ROW_UNIT_CPU))
    tallest = max((stop - start for start, stop in rows), default=0)
    return Tiles(rows, pieces, logits_buffer(tallest, widest, hidden_ND))


def piece_sums(hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, job: Job) -> tuple[Plan, Merged]:
    """hidden_ND: of the tokens worked on."""
    tile_loss = job.serve.tile_loss
    assert tile_loss is not None  # with recompute
    plan = tile_loss.plan_of(job.tokens, job.settings, hidden_ND.dtype)
    sums_CN, passes = plan.empty_sums(), tile_loss(plan)
    tiles = _tiles(hidden_ND, weight_VD.shape[0], job.options.chunk_bytes)
    for first, last in tiles.pieces:
        for start, stop in tiles.rows:
            tile_NP = tiles.logits(hidden_ND[start:stop], weight_VD[first:last], bias_V, first, last)
            passes.scan(sums_CN, tile_NP, start, job.shard.start + first)
    return plan, finish(plan, over_shards(plan, sums_CN, job.shard))


def piece_terms(hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, job: Job) -> TokenTerms:
    """The loss's terms without a gradient."""
    merged = piece_sums(job.hidden(hidden_ND, 0, job.n_rows), weight_VD, bias_V, job)[1]
    return job.spread(merged.terms)


def piece_gradients(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    job: Job,
    plan: Plan,
    merged: Merged,
    need: Sequence[bool],
) -> Gradients:
    """hidden_ND: of the tokens worked on, and so is its gradient, in the compute dtype."""
    assert job.serve.tile_loss is not None  # with recompute
    wide, passes = compute_dtype(hidden_ND.dtype), job.serve.tile_loss(plan)
    tiles = _tiles(hidden_ND, weight_VD.shape[0], job.options.chunk_bytes)
    main_VD, heard_ND = job.options.main_grad_VD, job.heard(hidden_ND, 0)
    dhidden_ND = torch.empty_like(hidden_ND, dtype=wide) if need[0] else None
    made = torch.empty_like if tiles.rows else torch.zeros_like  # of the pieces that no token meets
    dweight_VD = made(weight_VD) if need[1] and main_VD is None else None
    dbias_V = torch.zeros_like(weight_VD[:, 0], dtype=wide) if need[2] else None
    for first, last in tiles.pieces:
        weight_PD, dweight_PD = weight_VD[first:last], None
        if need[1] and main_VD is not None:
            dweight_PD = main_VD[first:last]
        elif dweight_VD is not None:
            one = len(tiles.rows) <= 1 or dweight_VD.dtype == wide
            dweight_PD = dweight_VD[first:last] if one else torch.empty_like(weight_PD, dtype=wide)
        for start, stop in tiles.rows:
            tile_NP = tiles.logits(hidden_ND[start:stop], weight_PD, bias_V, first, last)
            passes.gradient_(merged, tile_NP, start, job.shard.start + first)
            if dbias_V is not None:
                dbias_V[first:last] += tile_NP.sum(0, dtype=wide)
            if dhidden_ND is not None:
                hidden_gradient_into(dhidden_ND[start:stop], tile_NP, weight_PD, accumulate=first > 0)
            if dweight_PD is not None:
                added = main_VD is not None or start > 0
                weight_gradient_into(dweight_PD, tile_NP, heard_ND[start:stop], accumulate=added)
        if dweight_VD is not None and dweight_PD is not None and dweight_PD.dtype != dweight_VD.dtype:
            dweight_VD[first:last] = dweight_PD
    if dhidden_ND is not None:
        job.shard.sum_(dhidden_ND)
    return dhidden_ND, dweight_VD, dbias_V


class MadeInBackward(torch.autograd.Function):
    """Keeps the inputs and the rows' sums, and makes the tiles again."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, job: Job
    ) -> tuple[Tensor, ...]:
        ctx.plan, ctx.merged = piece_sums(job.hidden(hidden_ND, 0, job.n_rows), weight_VD, bias_V, job)
        ctx.job = job
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V)
        return outputs(ctx, job.spread(ctx.merged.terms), job)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        if dloss is None:
            return None, None, None, None
        hidden_ND, weight_VD, bias_V = ctx.saved_tensors
        job, merged = ctx.job, scaled_pulls(ctx.merged, dloss)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            dlive_ND, dweight_VD, dbias_V = piece_gradients(
                job.hidden(hidden_ND, 0, job.n_rows),
                weight_VD,
                bias_V,
                job,
                ctx.plan,
                merged,
                ctx.needs_input_grad[:3],
            )
        dhidden_ND = None if dlive_ND is None else dlive_ND.to(hidden_ND.dtype)
        if dhidden_ND is not None and job.live is not None:
            dhidden_ND = torch.zeros_like(hidden_ND).index_copy_(0, job.live, dhidden_ND)
        return dhidden_ND, dweight_VD, None if dbias_V is None else dbias_V.to(weight_VD.dtype), None
