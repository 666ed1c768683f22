"""Registration of the operators torch.ops.smopd.*, which torch.compile and torch.export see as one node each.

Library.define and impl take two thirds of the host time of torch.library.custom_op, and the loss with its
gradient, whose formula is a kernel of the Autograd key here, 0.6 of it (docs/kernels.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from smopd.kernels.types import compute_dtype

_LIBRARY = torch.library.Library("smopd", "FRAGMENT")  # unregisters its operators when it is collected


class Operator:
    """The operator smopd::name. n_leaves: how many of its first arguments may get a gradient."""

    def __init__(self, name: str, schema: str, implementation: Callable[..., Any], n_leaves: int):
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        if n_leaves == 0:  # what requires a gradient leaves the results without
            implementation = torch.no_grad()(implementation)
            _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
        _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
        self.name, self.n_leaves = name, n_leaves
        self.call = getattr(torch.ops.smopd, name).default

    def __call__(self, *arguments: Any) -> Any:
        return self.call(*arguments)

    def register_fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        return torch.library.register_fake(f"smopd::{self.name}", fake, lib=_LIBRARY)

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[[Any, tuple, Any], None]
    ) -> None:
        """The formula applies where a leaf requires a gradient."""
        call, n_leaves = self.call, self.n_leaves

        def forward(ctx: Any, *arguments: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                output = call(*arguments)
            setup_context(ctx, arguments, output)
            return output

        body = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        formula: Any = type(f"smopd_{self.name}", (torch.autograd.Function,), body)

        def autograd(*arguments: Any) -> Any:
            leaves = arguments[:n_leaves]
            if torch.is_grad_enabled() and any(leaf is not None and leaf.requires_grad for leaf in leaves):
                return formula.apply(*arguments)
            with torch._C._AutoDispatchBelowAutograd():
                return call(*arguments)

        _LIBRARY.impl(self.name, autograd, "Autograd")


def operator(name: str, schema: str, n_leaves: int = 0) -> Callable[[Callable[..., Any]], Operator]:
    """Decorates an operator's implementation."""
    return lambda implementation: Operator(name, schema, implementation, n_leaves)


def empty_column(like: Tensor, *shape: Any, dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor on like's device, of the dtype that rows like these are computed in."""
    return like.new_empty(shape, dtype=dtype or compute_dtype(like.dtype))
