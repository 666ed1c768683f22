"""The linear forms as operators smopd::linear_loss and smopd::linear_topk_logprobs, for compile and export.

Their gradients are made with the loss and scaled in backward, out of place. The public functions use them
where a graph is traced; what no operator can do (process groups, main_grad, recompute) is not traced.

Shapes: N tokens, V vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from smopd.kernels import dispatch
from smopd.kernels.head import loss as linear
from smopd.kernels.head import topk as linear_topk
from smopd.kernels.head.chunks import chunk_budget, make_job
from smopd.kernels.head.shards import Shard
from smopd.kernels.ops.operators import empty_column, operator
from smopd.kernels.ops.operators_loss import (
    N_OBJECTIVE,
    OBJECTIVE_SCHEMA,
    STATS_SCHEMA,
    fake_loss,
    loss_facts,
    objective_of,
    packed_stats,
    scaled_gradient,
)
from smopd.kernels.reference.loss import scale_
from smopd.kernels.tokens import total_loss
from smopd.kernels.types import LossSettings, LossTokens, TokenTerms

N_HEAD = 3  # hidden, weight, bias
_OPTIONS_SCHEMA = "SymInt? chunk_bytes, bool? compact, bool need_hidden, bool need_weight, bool need_bias"
_GRADIENTS_SCHEMA = "Tensor dhidden, Tensor dweight, Tensor dbias"


def serving_rows(
    hidden: Tensor, weight: Tensor, tokens: LossTokens, settings: LossSettings
) -> Callable[..., TokenTerms]:
    """The backend's loss_rows for the logits of this head."""
    facts = loss_facts(tokens, settings)
    return dispatch.serving("loss_rows", hidden, n_vocab=weight.shape[0], **facts)


def serving_topk(hidden: Tensor, weight: Tensor, kappa: int) -> dict[str, Any]:
    """What linear_topk takes of the backend for the logits of this head."""
    facts = {"n_vocab": weight.shape[0], "kappa": kappa}
    return {
        "topk_logprobs": dispatch.serving("topk_logprobs", hidden, **facts),
        "running": dispatch.running_topk(hidden, **facts),
    }


@operator(
    "linear_loss",
    f"(Tensor hidden, Tensor weight, Tensor? bias, {OBJECTIVE_SCHEMA}, {_OPTIONS_SCHEMA})"
    f" -> (Tensor loss, {_GRADIENTS_SCHEMA}, {STATS_SCHEMA})",
)
def linear_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    """A gradient that is not needed is empty: (0,)."""
    tokens, settings = objective_of(rest[:N_OBJECTIVE])
    chunk_bytes, compact, *need = rest[N_OBJECTIVE:]
    job = make_job(
        hidden,
        tokens,
        settings,
        compact=compact,
        shard=Shard(0, (weight.shape[0],)),
        chunk_bytes=chunk_budget(hidden, chunk_bytes, recompute=False),
        main_grad_VD=None,
        loss_rows=serving_rows(hidden, weight, tokens, settings),
        scale_=scale_,
    )
    with torch.autocast(hidden.device.type, enabled=False):
        terms, gradients = linear.by_rows(hidden, weight, bias, job, need)
    total, stats = total_loss(terms, tokens, settings)
    made = [hidden.new_empty(0) if grad is None else grad.to(hidden.dtype).contiguous() for grad in gradients]
    return total, *made, *packed_stats(stats)


@linear_loss.register_fake
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


linear_loss.register_autograd(_backward, setup_context=_setup)


@operator(
    "linear_topk_logprobs",
    "(Tensor hidden, Tensor weight, Tensor? bias, SymInt kappa, Tensor? token_ids, float temperature,"
    " SymInt? chunk_bytes) -> (Tensor ids, Tensor logps, Tensor token_logp)",
)
def linear_topk_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    kappa: int,
    token_ids: Tensor | None,
    temperature: float,
    chunk_bytes: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """token_logp is (0,) without token_ids."""
    top = linear_topk.linear_topk_logprobs(
        hidden,
        weight,
        kappa,
        token_ids_N=token_ids,
        bias_V=bias,
        temperature=temperature,
        chunk_bytes=chunk_bytes,
        **serving_topk(hidden, weight, kappa),
    )
    return top.ids_NS, top.logps_NS, empty_column(hidden, 0) if top.token_logp_N is None else top.token_logp_N


@linear_topk_logprobs.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    kappa: int,
    token_ids: Tensor | None,
    temperature: float,
    chunk_bytes: int | None,
) -> tuple[Tensor, ...]:
    n_rows = hidden.shape[0]
    ids = empty_column(hidden, n_rows, kappa, dtype=torch.int32)
    return ids, empty_column(hidden, n_rows, kappa), empty_column(hidden, 0 if token_ids is None else n_rows)
