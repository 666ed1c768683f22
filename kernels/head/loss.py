"""linear_smopd_loss: the objective on a linear head's logits, which are never held for all tokens.

    rows       (default) the logits of a chunk of tokens in one buffer, the backend's loss_rows in place on
               it, its gradient through the head; dweight is summed over the chunks. Three GEMMs.
    shards     (tp_group) the same with this rank's part of the vocabulary: the rows' sums are gathered
               (head/tiles.py), and the shares of the hidden states' gradient are summed over the ranks.
    recompute  tiles of rows and a piece of the vocabulary, made again in backward (head/recompute.py).

Tokens that count nowhere are taken out first where that costs no synchronisation.

Shapes: N tokens, D hidden, V vocabulary (this rank's part).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from smopd.kernels import checks
from smopd.kernels.head.chunks import (
    Gradients,
    Job,
    LinearOptions,
    Serving,
    chunk_budget,
    make_job,
    outputs,
    row_blocks,
)
from smopd.kernels.head.gemm import hidden_gradient_into, logits_into, weight_gradient_into
from smopd.kernels.head.recompute import MadeInBackward, piece_terms
from smopd.kernels.head.shards import shard_of
from smopd.kernels.head.tiles import sharded_loss_rows
from smopd.kernels.tokens import join_terms, total_loss
from smopd.kernels.types import LossSettings, LossStats, LossTokens, TokenTerms, compute_dtype

OP = "linear_smopd_loss"
NO_GRADIENT = (False, False, False)


def by_rows(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, job: Job, need: Sequence[bool]
) -> tuple[TokenTerms, Gradients]:
    """The terms of all tokens and the loss's gradients, those of weight and bias in fp32 or above if summed.

    need: which of hidden, weight, bias need one. Under a process group hidden's is in fp32 or above, too.
    """
    wide, loss_rows = compute_dtype(hidden_ND.dtype), job.serve.loss_rows
    assert loss_rows is not None  # without recompute
    budget = chunk_budget(hidden_ND, job.options.chunk_bytes, recompute=False)
    widest = max(job.shard.sizes)
    blocks, logits_NV = row_blocks(job.n_rows, hidden_ND, weight_VD.shape[0], budget, widest=widest)
    dhidden_ND = dweight_VD = dbias_V = None
    if need[0]:
        made = torch.empty_like if job.live is None else torch.zeros_like  # of rows that were left out
        dhidden_ND = made(hidden_ND, dtype=hidden_ND.dtype if job.shard.group is None else wide)
    if need[1]:
        once = len(blocks) == 1 and job.options.main_grad_VD is None
        dweight_VD = torch.empty_like(weight_VD, dtype=weight_VD.dtype if once else wide)
    if need[2]:
        dbias_V = torch.zeros_like(weight_VD[:, 0], dtype=wide)
    parts = []
    for start, stop in blocks:
        chunk_ND, chunk_NV = job.hidden(hidden_ND, start, stop), logits_NV[: stop - start]
        logits_into(chunk_NV, chunk_ND, weight_VD, bias_V)
        tokens = job.tokens.rows(start, stop)
        parts.append(loss_rows(chunk_NV, tokens, job.settings, chunk_NV if any(need) else None))
        if dbias_V is not None:
            dbias_V += chunk_NV.sum(0, dtype=wide)
        if dhidden_ND is not None and job.live is None:
            hidden_gradient_into(dhidden_ND[start:stop], chunk_NV, weight_VD)
        elif dhidden_ND is not None and job.live is not None:
            share_ND = torch.empty_like(chunk_ND, dtype=dhidden_ND.dtype)
            hidden_gradient_into(share_ND, chunk_NV, weight_VD)
            dhidden_ND[job.live[start:stop]] = share_ND
        if dweight_VD is not None:
            weight_gradient_into(dweight_VD, chunk_NV, job.heard(chunk_ND, start), accumulate=start > 0)
    if dweight_VD is not None and not blocks:
        dweight_VD.zero_()
    if dhidden_ND is not None:
        job.shard.sum_(dhidden_ND)
    return job.spread(join_terms(parts, hidden_ND)), (dhidden_ND, dweight_VD, dbias_V)


class _MadeInForward(torch.autograd.Function):
    """The gradients are made with the loss, for an upstream gradient of 1, and scaled in backward."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, job: Job
    ) -> tuple[Tensor, ...]:
        terms, gradients = by_rows(hidden_ND, weight_VD, bias_V, job, ctx.needs_input_grad[:3])
        ctx.job = job
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (hidden_ND, weight_VD, bias_V)]
        ctx.save_for_backward(*gradients)
        return outputs(ctx, terms, job)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        if dloss is None:
            return None, None, None, None
        gradients = list(ctx.saved_tensors)
        if ctx.job.options.main_grad_VD is not None and gradients[1] is not None:
            ctx.job.options.main_grad_VD.addcmul_(gradients[1], dloss)
            gradients[1] = None
        # Memory that nobody asks for again is scaled in place and given away.
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        for index, (gradient, dtype) in enumerate(zip(gradients, ctx.dtypes, strict=True)):
            if gradient is not None:
                gradients[index] = _scaled(gradient, dloss, dtype, ctx.job.serve, keep=keep)
        return *gradients, None


def _scaled(gradient: Tensor, dloss: Tensor, dtype: torch.dtype, serve: Serving, *, keep: bool) -> Tensor:
    """gradient * dloss, rounded once to dtype. On an accelerator that is one pass, whatever dloss is."""
    if gradient.dtype != dtype and gradient.device.type != "cpu":
        rounded = torch.empty_like(gradient, dtype=dtype)
        serve.scale_(gradient, dloss, rounded)
        return rounded
    gradient = gradient.clone() if keep else gradient
    serve.scale_(gradient, dloss)
    return gradient.to(dtype)


def linear_smopd_loss(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    tokens: LossTokens,
    settings: LossSettings,
    options: LinearOptions,
    serve: Serving,
) -> tuple[Tensor, LossStats]:
    inputs = (hidden_ND, weight_VD, bias_V)
    shard = shard_of(OP, weight_VD, options.tp_group, options.shard_sizes)
    if options.tp_group is not None:
        assert serve.tile_loss is not None  # under a group
        loss_rows = functools.partial(sharded_loss_rows, shard=shard, tile_loss=serve.tile_loss)
        serve = replace(serve, loss_rows=loss_rows)
    differentiable = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    if differentiable and options.main_grad_VD is not None:
        _check_main_grad(options.main_grad_VD, weight_VD)
    with torch.autocast(hidden_ND.device.type, enabled=False):
        with torch.no_grad():
            job = make_job(hidden_ND, tokens, settings, options, shard, serve)
            if not differentiable:
                terms = (
                    piece_terms(*inputs, job) if options.recompute else by_rows(*inputs, job, NO_GRADIENT)[0]
                )
                return total_loss(terms, tokens, settings)
        function = MadeInBackward if options.recompute else _MadeInForward
        loss, *flat = function.apply(*inputs, job)
        return loss, LossStats(*flat)


def _check_main_grad(main_grad_VD: Tensor, weight_VD: Tensor) -> None:
    if not weight_VD.requires_grad:
        raise ValueError(f"{OP}: main_grad_VD came with a weight_VD that requires no gradient, expected None")
    dtypes = (compute_dtype(weight_VD.dtype),)
    like = ("weight_VD", weight_VD)
    checks.check_tensor(OP, "main_grad_VD", main_grad_VD, tuple(weight_VD.shape), dtypes, like=like)
