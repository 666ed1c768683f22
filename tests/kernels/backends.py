"""Calls of an operation on each backend.

Triton runs natively on a GPU, else in its interpreter, which is slow and gets only a few rows of a case.
"""

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from smopd.kernels import cpp, dispatch
from smopd.kernels.types import TokenTerms

GPU = torch.cuda.is_available()
INTERPRETED_ROWS = 2
SMALL_VOCABULARY = 10_000  # larger ones have several parts anyway
PARTS = 3  # about, of a small row in the split kernel


def fuse_in_the_interpreter() -> None:
    """Let tl.fma round once, as hardware does: the interpreter rounds the product first."""
    from triton.runtime import interpreter

    def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        wide = x.data.astype("float64") * y.data + z.data
        return interpreter.TensorHandle(wide.astype(x.data.dtype), z.dtype.scalar)

    interpreter.InterpreterBuilder.create_fma = fma


def quicken_the_interpreter() -> None:
    """Patch Triton's language once a launch: the interpreter does it again at each call of a function."""
    from triton import language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    def patch_once(function: Any) -> Any:
        langs = [each for each in function.__globals__.values() if each is tl or each is tl.core]
        return patch(function) if any(tl.core.is_builtin(lang.load) for lang in langs) else None

    interpreter._patch_lang = patch_once


if not GPU and importlib.util.find_spec("triton"):
    fuse_in_the_interpreter()
    quicken_the_interpreter()


def each(operation: str, *, but: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """Parametrize a test over the backends that have the operation, except `but`."""
    having = list(dispatch.MODULES[operation])
    having += ["triton split"] if operation == "loss_rows" else []  # a second kernel of Triton
    return pytest.mark.parametrize("backend", [backend for backend in having if backend not in but])


def need(backend: str) -> None:
    """Skip the test if the backend cannot run here."""
    if backend == "cpp" and (why_not := cpp.unavailable()) is not None:
        pytest.skip(why_not)
    if backend.startswith("triton"):
        pytest.importorskip("triton", reason="triton is not installed")
        from smopd.kernels.triton import loss

        if not GPU and loss._NATIVE:
            pytest.skip("no GPU, and the kernels were imported without TRITON_INTERPRET")


def device(backend: str) -> str:
    return "cuda" if backend.startswith("triton") and GPU else "cpu"


def interpreted(backend: str) -> bool:
    return backend.startswith("triton") and not GPU


def leave_to_a_gpu(backend: str, case: bool) -> None:
    """Skip a case that is slow in the interpreter and similar to others."""
    if case and interpreted(backend):
        pytest.skip("left to a GPU: slow in Triton's interpreter")


def rows_for(backend: str, n_rows: int, most: int = INTERPRETED_ROWS) -> Tensor:
    """Return the indices of all rows; for the interpreter a few, with the first and the last."""
    few = min(n_rows, most) if interpreted(backend) else n_rows
    return torch.linspace(0, n_rows - 1, few).long()


def moved(value: Any, to: str) -> Any:
    """Move tensors to a device, also in lists, tuples, dicts and dataclasses."""
    if isinstance(value, Tensor):
        return value if value.device.type == to else value.to(to)
    if isinstance(value, dict):
        return {name: moved(entry, to) for name, entry in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(moved(entry, to) for entry in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: moved(getattr(value, f.name), to) for f in fields(value)})
    return value


@functools.cache
def function(backend: str, operation: str) -> Callable[..., Any]:
    """Return the backend's function."""
    if backend == "triton split":
        return _loss_of_split_rows
    module = importlib.import_module(f"smopd.kernels.{dispatch.MODULES[operation][backend]}")
    return getattr(module, operation)


def _loss_of_split_rows(logits_NV: Tensor, *arguments: Any) -> TokenTerms:
    """Call loss_rows so that even a small vocabulary is split into several parts of 32 lanes."""
    from smopd.kernels.triton import loss

    n_vocab, vector = logits_NV.shape[1], 32 * 16 // logits_NV.element_size()
    small = {"_SPLIT_LANES": 32, "_SPLIT_VECTORS": max(3, n_vocab // (PARTS * vector))}
    small = small if n_vocab < SMALL_VOCABULARY else {}
    with mock.patch.multiple(loss, _MAX_HELD=0, _SPLIT_TAIL_SLOTS=32, **small):
        return loss.loss_rows(logits_NV, *arguments)


def call(backend: str, operation: str, *arguments: Any, **options: Any) -> Any:
    """Call the backend's function with arguments from the CPU and return the result to the CPU."""
    need(backend)
    there = moved((arguments, options), device(backend))
    return moved(function(backend, operation)(*there[0], **there[1]), "cpu")


def same(some: Any, others: Any) -> bool:
    """Whether tensors, or tuples or dataclasses of them, are equal bit for bit (NaN equals NaN)."""
    if isinstance(some, Tensor):
        equal = (some == others) | (some.isnan() & others.isnan())
        return some.shape == others.shape and some.dtype == others.dtype and bool(equal.all())
    if is_dataclass(some) and not isinstance(some, type):
        some, others = ([getattr(value, f.name) for f in fields(some)] for value in (some, others))
    if isinstance(some, (tuple, list)):
        return all(map(same, some, others)) and len(some) == len(others)
    return some == others
