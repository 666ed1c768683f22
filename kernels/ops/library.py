"""Registers the operators torch.ops.smopd.*. For torch.compile and torch.export, each is one node.

A call needs at most two thirds of the host time of a call through torch.library.custom_op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from smopd.kernels.types import compute_dtype

NAMESPACE = "smopd"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")  # keeps the operators registered


class Operator:
    """The operator smopd::name. Only its first n_leaves arguments may have a gradient."""

    def __init__(self, name: str, schema: str, implementation: Callable[..., Any], n_leaves: int):
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        if n_leaves == 0:  # results require no gradient even if arguments do
            implementation = torch.no_grad()(implementation)
            _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
        _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
        self.name, self.n_leaves = name, n_leaves
        self.call = getattr(getattr(torch.ops, NAMESPACE), name).default

    def __call__(self, *arguments: Any) -> Any:
        return self.call(*arguments)

    def register_fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        return torch.library.register_fake(f"{NAMESPACE}::{self.name}", fake, lib=_LIBRARY)

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[[Any, tuple, Any], None]
    ) -> None:
        call, n_leaves = self.call, self.n_leaves

        def forward(ctx: Any, *arguments: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                output = call(*arguments)
            setup_context(ctx, arguments, output)
            return output

        body = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        formula: Any = type(f"smopd_{self.name}", (torch.autograd.Function,), body)

        def autograd(*arguments: Any) -> Any:
            needed = any(leaf is not None and leaf.requires_grad for leaf in arguments[:n_leaves])
            forward_mode = torch.autograd.forward_ad._current_level >= 0  # `apply` raises an error
            if forward_mode or (needed and torch.is_grad_enabled()):
                return formula.apply(*arguments)
            with torch._C._AutoDispatchBelowAutograd():
                return call(*arguments)

        _LIBRARY.impl(self.name, autograd, "Autograd")


def operator(name: str, schema: str, n_leaves: int = 0) -> Callable[[Callable[..., Any]], Operator]:
    return lambda implementation: Operator(name, schema, implementation, n_leaves)


def empty_column(like: Tensor, *shape: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Return an uninitialized tensor on the device of `like`, by default in its compute dtype."""
    return like.new_empty(shape, dtype=dtype or compute_dtype(like.dtype))
