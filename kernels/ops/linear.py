"""The whole objective on a linear head's hidden states, without its logits.

The public function calls the operator smopd::linear_loss where a graph is traced, for compile and export;
what no operator can do (process groups, main_grad, recompute) is not traced. The operator's gradients are
made with the loss and scaled in backward, out of place.

Shapes: N packed response tokens, V vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from smopd.kernels import checks, dispatch
from smopd.kernels.head import loss as linear
from smopd.kernels.head.chunks import LinearOptions, Serving, make_job
from smopd.kernels.head.shards import Shard
from smopd.kernels.ops.library import operator
from smopd.kernels.ops.loss import (
    DEFAULT_SETTINGS,
    N_OBJECTIVE,
    OBJECTIVE_SCHEMA,
    STATS_SCHEMA,
    fake_loss,
    flat_objective,
    loss_facts,
    objective_of,
    packed_stats,
    scale_,
    scaled_gradient,
    unpacked_stats,
)
from smopd.kernels.tokens import total_loss
from smopd.kernels.types import LossSettings, LossStats, LossTokens


def linear_smopd_loss(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    tokens: LossTokens,
    settings: LossSettings = DEFAULT_SETTINGS,
    *,
    bias_V: Tensor | None = None,
    chunk_bytes: int | None = None,
    recompute: bool = False,
    tp_group: Any = None,
    shard_sizes: Sequence[int] | None = None,
    main_grad_VD: Tensor | None = None,
    compact: bool | None = None,
) -> tuple[Tensor, LossStats]:
    """smopd_loss of a linear head's logits, hidden @ weight.T + bias, without ever holding (N, V).

    Logits are made in the inputs' dtype, as the head itself would make them, a chunk of tokens at a time. The
    chunk's gradients in hidden, weight and bias are made with its loss and kept; backward scales them by the
    upstream gradient, in place where the graph is not retained. A tensor that needs no gradient costs none.
    The gradients of weight and bias are summed in fp32 (fp64 for fp64). Autocast changes nothing. What
    smopd_loss says of fp16 holds for the chunk's gradients; recompute knows the upstream gradient first.

    recompute=True makes tiles of tokens and a piece of the vocabulary instead, and makes them again in
    backward: four matrix products instead of three, for chunk_bytes and the gradients themselves as the only
    memory.

    Args:
        hidden_ND: (N, D).
        weight_VD: (V, D), hidden's dtype; under tp_group this rank's rows of it, in rank order.
        tokens, settings: as in smopd_loss.
        bias_V: (V,) or None, cut like the weight.
        chunk_bytes: bound of the logits held at a time, in their own dtype; one row, or a tile of one row
            and 1024 columns, is always allowed. None: on a CPU 160 MiB, and 32 MiB with recompute; elsewhere
            1.25 GiB and 256 MiB.
        recompute: keep the inputs and O(N S) numbers, nothing else, between forward and backward.
        tp_group: process group that holds the head in shards of any sizes above 0, each rank with the same
            hidden states and tokens. Every rank gets the whole loss, the whole gradient of hidden, and its
            shard's of weight and bias. The ranks exchange O(N S) numbers and the sum of hidden's gradient.
        shard_sizes: the number of rows at each rank of tp_group; None: they are asked, which costs one host
            synchronisation on an accelerator.
        main_grad_VD: (V, D) fp32 (fp64 for fp64), to which backward adds the weight's gradient;
            weight_VD.grad stays as it is. With recompute the products are summed into it; else a sum of its
            size stands beside it until backward.
        compact: leave out the tokens whose weights are all 0 before any product. None: on a CPU; elsewhere
            True costs one host synchronisation. Either way they add exactly nothing and get the gradient 0.
    Returns:
        loss: 0-dim, differentiable (once) in hidden_ND, weight_VD and bias_V.
        stats: LossStats, detached.
    Raises:
        TypeError, ValueError: an argument is not as above.
    """
    op = "linear_smopd_loss"
    checks.check_linear(op, hidden_ND, weight_VD, bias_V, chunk_bytes)
    checks.check_loss_tokens(op, tokens, settings, ("hidden_ND", hidden_ND))
    if checks.debugging():
        checks.debug_finite(op, "hidden_ND", hidden_ND)
        checks.debug_finite(op, "weight_VD", weight_VD)
        if tp_group is None:
            checks.debug_loss_tokens(op, tokens, weight_VD.shape[0])
    if torch.compiler.is_compiling() and tp_group is None and main_grad_VD is None and not recompute:
        need = [
            torch.is_grad_enabled() and x is not None and x.requires_grad
            for x in (hidden_ND, weight_VD, bias_V)
        ]
        flat = (*flat_objective(tokens, settings), chunk_bytes, compact, *need)
        loss, _, _, _, *stats = _linear_loss(hidden_ND, weight_VD, bias_V, *flat)
        return loss, unpacked_stats(*stats)
    if recompute or tp_group is not None:
        form, facts = "recompute" if recompute else "tp_group", loss_facts(tokens, settings)
        serve = Serving(scale_=scale_, tile_loss=dispatch.tile_loss(op, form, hidden_ND, **facts))
    else:
        serve = _serving(hidden_ND, weight_VD, tokens, settings)
    options = LinearOptions(chunk_bytes, recompute, tp_group, shard_sizes, main_grad_VD, compact)
    return linear.linear_smopd_loss(hidden_ND, weight_VD, bias_V, tokens, settings, options, serve)


N_HEAD = 3  # hidden, weight, bias
_OPTIONS_SCHEMA = "SymInt? chunk_bytes, bool? compact, bool need_hidden, bool need_weight, bool need_bias"
_GRADIENTS_SCHEMA = "Tensor dhidden, Tensor dweight, Tensor dbias"


def _serving(hidden: Tensor, weight: Tensor, tokens: LossTokens, settings: LossSettings) -> Serving:
    """The backend's functions for the logits of this head, in rows."""
    facts = loss_facts(tokens, settings)
    loss_rows = dispatch.serving("loss_rows", hidden, n_vocab=weight.shape[0], **facts)
    return Serving(scale_=scale_, loss_rows=loss_rows)


@operator(
    "linear_loss",
    f"(Tensor hidden, Tensor weight, Tensor? bias, {OBJECTIVE_SCHEMA}, {_OPTIONS_SCHEMA})"
    f" -> (Tensor loss, {_GRADIENTS_SCHEMA}, {STATS_SCHEMA})",
)
def _linear_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    """A gradient that is not needed is empty: (0,)."""
    tokens, settings = objective_of(rest[:N_OBJECTIVE])
    chunk_bytes, compact, *need = rest[N_OBJECTIVE:]
    options, shard = LinearOptions(chunk_bytes, compact=compact), Shard(0, (weight.shape[0],))
    job = make_job(hidden, tokens, settings, options, shard, _serving(hidden, weight, tokens, settings))
    with torch.autocast(hidden.device.type, enabled=False):
        terms, gradients = linear.by_rows(hidden, weight, bias, job, need)
    total, stats = total_loss(terms, tokens, settings)
    made = [hidden.new_empty(0) if grad is None else grad.to(hidden.dtype).contiguous() for grad in gradients]
    return total, *made, *packed_stats(stats)


@_linear_loss.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    total, stats = fake_loss(hidden, hidden.shape[0])
    leaves = (hidden, weight, weight[:, 0])
    made = [
        torch.empty_like(leaf, memory_format=torch.contiguous_format) if needed else hidden.new_empty(0)
        for leaf, needed in zip(leaves, rest[-N_HEAD:], strict=True)
    ]
    return total, *made, *stats


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.need = inputs[-N_HEAD:]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1 : 1 + N_HEAD])


@once_differentiable
def _backward(ctx: Any, dloss: Tensor | None, *_: Tensor | None) -> tuple:
    grads: list[Tensor | None] = [None] * N_HEAD
    if dloss is not None:
        for index, (gradient, needed) in enumerate(zip(ctx.saved_tensors, ctx.need, strict=True)):
            grads[index] = scaled_gradient(gradient, dloss) if needed else None
    return *grads, *[None] * (N_OBJECTIVE + 2 + N_HEAD)


_linear_loss.register_autograd(_backward, setup_context=_setup)
