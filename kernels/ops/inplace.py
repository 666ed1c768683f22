"""The loss with its gradient written over the logits: an autograd.Function, since no operator may do that.

Shapes: N tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from smopd.kernels.ops.operators_loss import flat_stats, loss_of_rows, scale_
from smopd.kernels.types import LossSettings, LossStats, LossTokens


class _LossInPlace(torch.autograd.Function):
    """Returns the logits dirty, which rebases their history on this node.

    owner is the tensor that owns the logits' memory (a view cannot be marked dirty beside other outputs);
    layout is the logits' (size, stride, offset) in it.
    """

    @staticmethod
    def forward(
        ctx: Any, owner: Tensor, layout: tuple, tokens: LossTokens, settings: LossSettings
    ) -> tuple[Tensor, ...]:
        logits_NV = owner.as_strided(*layout)
        loss, stats = loss_of_rows(logits_NV, tokens, settings, logits_NV)
        ctx.mark_dirty(owner)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(owner)
        ctx.spent = False
        ctx.mark_non_differentiable(*flat_stats(stats))
        return loss, owner, *flat_stats(stats)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dloss: Tensor | None, downer: Tensor | None, *_: Tensor
    ) -> tuple[Tensor | None, ...]:
        if downer is not None:
            raise RuntimeError(
                "smopd_loss: logits_NV was used in another differentiable operation after inplace=True; "
                "it holds the gradient then, expected no use of it"
            )
        if ctx.spent:
            raise RuntimeError(
                "smopd_loss: a second backward came through inplace=True, expected one; "
                "the logits' memory held the only copy of the gradient; use inplace=False"
            )
        ctx.spent = True
        if dloss is None:
            return None, None, None, None
        grad = ctx.saved_tensors[0].detach()
        scale_(grad, dloss)
        return grad, None, None, None


def smopd_loss_inplace(
    logits_NV: Tensor, tokens: LossTokens, settings: LossSettings
) -> tuple[Tensor, LossStats]:
    owner = _owner(logits_NV)
    layout = (logits_NV.size(), logits_NV.stride(), logits_NV.storage_offset())
    loss, _, *flat = _LossInPlace.apply(owner, layout, tokens, settings)
    return loss, LossStats(*flat)


def _owner(logits_NV: Tensor) -> Tensor:
    owner = logits_NV._base if logits_NV._is_view() and logits_NV._base is not None else logits_NV
    if owner.is_leaf or logits_NV.is_leaf:
        raise ValueError(
            "smopd_loss: logits_NV is a leaf, expected the output of an operation for inplace=True"
        )
    if owner.numel() != logits_NV.numel() or owner.dtype != logits_NV.dtype:
        raise ValueError(
            f"smopd_loss: logits_NV is a view of {logits_NV.numel()} of the {owner.numel()} elements of a "
            f"tensor of shape {tuple(owner.shape)}, "
            "expected a whole tensor or a view of all of it for inplace=True"
        )
    return owner
