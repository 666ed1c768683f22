"""What the operations' torch.library operators smopd::… share, and the short way past them.

An operation's file has the public function, which checks its arguments and calls the operator, and then the
operator: schema, fake kernel, autograd formula. torch.compile and torch.export see one node each. Every
implementation asks dispatch which backend serves the call.

Through the dispatcher a call costs several times what its implementation needs on the host. So a plain call,
which nobody but the implementation has to see, goes to it at once: Operator.skips says which is plain.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from smopd.kernels.types import Candidates, SparseTarget, compute_dtype

_TYPES: dict[str, tuple[type, ...]] = {
    "Tensor": (Tensor, torch.nn.Parameter),
    "SymInt": (int,),
    "bool": (bool,),
    "float": (float,),
    "str": (str,),
}
"""A schema's type and what its argument is in a plain call: no subclass, and no integer for a float."""

_requires_grad = attrgetter("requires_grad")


def watched() -> bool:
    """Whether a compiler, a tracer, a mode or a transform may want to see the calls of this thread."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._is_tracing()
        or forward_ad._current_level >= 0
    )


class Operator:
    """The operator smopd::name. Called, it is the registered one, or for a plain call its implementation.

    Both ways have the same values, errors and autograd formula. A profile shows `smopd::name` of the first.
    """

    def __init__(self, name: str, schema: str, implementation: Callable[..., Any]):
        define = torch.library.custom_op(f"smopd::{name}", mutates_args=(), schema=schema)
        self.registered = define(implementation)
        self.implementation = implementation
        self.register_fake = self.registered.register_fake
        self._formula: type[torch.autograd.Function] | None = None
        arguments = schema[1 : schema.index(")")].split(", ")
        self._types = [_accepted(argument.split()[0]) for argument in arguments]
        self._plain_types: set[tuple[type, ...]] = set()

    def __call__(self, *arguments: Any) -> Any:
        if not self.skips(*arguments):
            return self.registered(*arguments)
        if self._formula is not None and torch.is_grad_enabled() and arguments[0].requires_grad:
            return self._formula.apply(*arguments)
        return self.implementation(*arguments)

    def skips(self, *arguments: Any) -> bool:
        """Whether this call is plain: unwatched, its types exactly the schema's, its tensors plain memory.

        And if any needs a gradient it is the first, of an operator with a formula.
        """
        if watched():
            return False
        if type(arguments[0]) is list:
            arguments = (*arguments[0], *arguments[1:])
        types = tuple(map(type, arguments))
        if types not in self._plain_types:
            n_listed = len(types) - len(self._types)
            accepted = [self._types[0]] * n_listed + self._types
            if not all(kind in kinds for kind, kinds in zip(types, accepted, strict=True)):
                return False
            self._plain_types.add(types)
        tensors = [value for value in arguments if isinstance(value, Tensor)]
        if tensors[0].is_meta or any(map(Tensor.is_neg, tensors)) or any(map(Tensor._is_zerotensor, tensors)):
            return False
        without = tensors if self._formula is None else tensors[1:]
        return not (torch.is_grad_enabled() and any(map(_requires_grad, without)))

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[[Any, tuple, Any], None]
    ) -> None:
        self.registered.register_autograd(backward, setup_context=setup_context)
        implementation = self.implementation

        def forward(ctx: Any, *arguments: Any) -> Any:
            output = implementation(*arguments)
            setup_context(ctx, arguments, output)
            return output

        body = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        self._formula = type(f"smopd_{self.registered._name}", (torch.autograd.Function,), body)


def operator(name: str, schema: str) -> Callable[[Callable[..., Any]], Operator]:
    """Decorates an implementation. The first of the schema's arguments is a tensor, or a list of some."""
    return lambda implementation: Operator(name, schema, implementation)


def _accepted(kind: str) -> tuple[type, ...]:
    """The types of plain arguments for a schema's `float` or `Tensor?`, of the elements for `Tensor[]`."""
    types = _TYPES[kind.removesuffix("?").removesuffix("[]")]
    return (*types, type(None)) if kind.endswith("?") else types


def empty_column(like: Tensor, *shape: Any, dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor on like's device, of the dtype that rows like these are computed in."""
    return like.new_empty(shape, dtype=dtype or compute_dtype(like.dtype))


def target_facts(target: SparseTarget | Candidates) -> dict[str, int]:
    """dispatch.serving's facts of a target."""
    if isinstance(target, SparseTarget):
        return {"n_support": target.ids_NS.shape[1]}
    return {"n_support": target.kappa, "n_pooled": target.ids_NMS.shape[1] * target.ids_NMS.shape[2]}
