"""The loss as the operator smopd::loss: its gradient is made with it, and scaled in backward.

Its arguments are LossTokens and LossSettings, flattened field by field.

Shapes: N tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from smopd.kernels import checks, dispatch
from smopd.kernels.ops.operators import empty_column, operator, target_facts
from smopd.kernels.reference import loss as reference_loss
from smopd.kernels.tokens import STATS_FIELDS, total_loss
from smopd.kernels.types import LossSettings, LossStats, LossTokens, compute_dtype, loss_target

TOKEN_FIELDS = tuple(field.name for field in fields(LossTokens))
SETTING_FIELDS = tuple(field.name for field in fields(LossSettings))
_SETTING_TYPES = {"float": "float", "float | None": "float?", "int": "SymInt", "bool": "bool", "str": "str"}


def _objective_schema() -> str:
    columns = [
        f"Tensor{'' if field.default is MISSING else '?'} {field.name}" for field in fields(LossTokens)
    ]
    options = [f"{_SETTING_TYPES[str(field.type)]} {field.name}" for field in fields(LossSettings)]
    return ", ".join(columns + options)


STATS_SCHEMA = "Tensor columns, Tensor clipped, Tensor sums"
_COLUMNS = tuple(name for name in STATS_FIELDS if name.endswith("_N") and name != "clipped_N")
_SUMS = tuple(name for name in STATS_FIELDS if not name.endswith("_N"))
OBJECTIVE_SCHEMA = _objective_schema()
N_OBJECTIVE = len(TOKEN_FIELDS) + len(SETTING_FIELDS)


def flat_objective(tokens: LossTokens, settings: LossSettings) -> tuple:
    """Tokens and settings as OBJECTIVE_SCHEMA's arguments."""
    columns = [getattr(tokens, name) for name in TOKEN_FIELDS]
    return (*columns, *(getattr(settings, name) for name in SETTING_FIELDS))


def objective_of(flat: Sequence[Any]) -> tuple[LossTokens, LossSettings]:
    """The inverse of flat_objective."""
    tokens = LossTokens(**dict(zip(TOKEN_FIELDS, flat[: len(TOKEN_FIELDS)], strict=True)))
    return tokens, LossSettings(**dict(zip(SETTING_FIELDS, flat[len(TOKEN_FIELDS) :], strict=True)))


def flat_stats(stats: LossStats) -> tuple[Tensor, ...]:
    return tuple(getattr(stats, name) for name in STATS_FIELDS)


def packed_stats(stats: LossStats) -> tuple[Tensor, Tensor, Tensor]:
    """LossStats as STATS_SCHEMA: (C, N), (N,), (4,). The outputs of an operator share no memory."""
    columns, sums = (torch.stack([getattr(stats, name) for name in names]) for names in (_COLUMNS, _SUMS))
    return columns, stats.clipped_N.clone(), sums


def unpacked_stats(columns: Tensor, clipped: Tensor, sums: Tensor) -> LossStats:
    """The inverse of packed_stats."""
    named = dict(zip((*_COLUMNS, *_SUMS), (*columns.unbind(), *sums.unbind()), strict=True))
    return LossStats(**named, clipped_N=clipped)


def fake_loss(like: Tensor, n_rows: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The loss and packed_stats for n_rows tokens, empty."""
    columns = empty_column(like, len(_COLUMNS), n_rows)
    clipped = empty_column(like, n_rows, dtype=torch.int8)
    return empty_column(like), (columns, clipped, empty_column(like, len(_SUMS)))


def loss_of_rows(
    logits: Tensor, tokens: LossTokens, settings: LossSettings, grad: Tensor | None
) -> tuple[Tensor, LossStats]:
    """The loss, by the backend that serves the logits; its gradient goes to grad, which may be the logits."""
    checks.require_loss_ids("smopd_loss", tokens, settings, logits.shape[1])
    serve = dispatch.serving("loss_rows", logits, **loss_facts(tokens, settings))
    return total_loss(serve(logits, tokens, settings, grad), tokens, settings)


def loss_facts(tokens: LossTokens, settings: LossSettings) -> dict[str, int]:
    """dispatch.serving's facts of a loss's target."""
    target = loss_target(tokens, settings)
    return {} if target is None else target_facts(target)


@operator(
    "loss",
    f"(Tensor logits, {OBJECTIVE_SCHEMA}, bool need_grad) -> (Tensor loss, Tensor grad, {STATS_SCHEMA})",
)
def loss(logits: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """grad is the loss's gradient in the logits, (0, V) without need_grad."""
    *objective, need_grad = rest
    tokens, settings = objective_of(objective)
    grad = torch.empty_like(logits) if need_grad else logits.new_empty((0, logits.shape[1]))
    total, stats = loss_of_rows(logits, tokens, settings, grad if need_grad else None)
    return total, grad, *packed_stats(stats)


@loss.register_fake
def _(logits: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    total, stats = fake_loss(logits, logits.shape[0])
    grad = torch.empty_like(logits) if rest[-1] else logits.new_empty((0, logits.shape[1]))
    return total, grad, *stats


def _loss_setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.need_grad = inputs[-1]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1])


@once_differentiable
def _loss_backward(ctx: Any, dloss: Tensor | None, *_: Tensor | None) -> tuple:
    grad = None
    if dloss is not None:
        if not ctx.need_grad:
            raise RuntimeError("smopd::loss: backward came after need_grad=False, expected need_grad=True")
        grad = scaled_gradient(ctx.saved_tensors[0], dloss)
    return grad, *[None] * (N_OBJECTIVE + 1)


loss.register_autograd(_loss_backward, setup_context=_loss_setup)


def scaled_gradient(grad: Tensor, dloss: Tensor) -> Tensor:
    """grad * dloss, rounded once. Memory that no other backward asks for is scaled in place."""
    traced = type(dloss) is not Tensor  # by torch.compile or torch.export: it has no value
    if not traced and dloss.device.type == "cpu" and dloss.item() == 1.0:
        return grad
    if not traced and not torch._C._autograd._get_current_graph_task_keep_graph():
        scale_(grad, dloss)
        return grad
    return (grad.to(compute_dtype(grad.dtype)) * dloss).to(grad.dtype)


def scale_(grad: Tensor, dloss: Tensor) -> None:
    """grad *= dloss, without touching grad where dloss is 1 and without a host synchronisation."""
    on_cpu = grad.device.type == "cpu"
    (reference_loss.scale_ if on_cpu else dispatch.serving("scale_", grad))(grad, dloss)
