"""The backends whose operations one suite holds to one truth, and which operation each of them has.

Triton runs natively on a GPU and in its interpreter elsewhere, which pays by the row: few of a case's rows
are asked of it there. The loss of a head's tiles is one of the losses, with a backend's name of its own.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
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

from smopd.kernels import dispatch
from smopd.kernels.head.tiles import finish
from smopd.kernels.types import LossSettings, LossTokens, TokenTerms

GPU = torch.cuda.is_available()
OPERATIONS = (
    "topk_logprobs",
    "teacher_mixture",
    "teacher_product",
    *dispatch.ROW_OPS,
    "total_loss",
    "scale_",
    "draw",
    "advantages",
)
ALL = ("reference", "reference tiles", "cpp", "cpp tiles", "triton", "triton tiles", "triton split")
TILES = {"reference tiles": "reference.tiles", "cpp tiles": "cpp", "triton tiles": "triton.tiles"}
TILED = tuple(operation for operation in OPERATIONS if operation != "loss_rows")
# What does not exist: a test holds dispatch to it.
ABSENT = {
    *(
        ("cpp", operation) for operation in ("total_loss", "scale_", "draw", "advantages")
    ),  # the reference serves a CPU
    *(
        (form, operation) for form in (*TILES, "triton split") for operation in TILED
    ),  # the loss alone has them
}
INTERPRETED_ROWS = 2


def each(operation: str, *, but: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """A test for each backend that has the operation. but: those that do not promise what the test holds."""
    return pytest.mark.parametrize(
        "backend", [name for name in ALL if (name, operation) not in ABSENT and name not in but]
    )


def need(backend: str) -> None:
    """Skips where the backend cannot run here."""
    if backend.startswith("cpp") and (why_not := dispatch.cpp_unavailable()) is not None:
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
    """Skips a case that the interpreter would pay dearly for, and that differs from its others in little."""
    if case and interpreted(backend):
        pytest.skip("left to a GPU: Triton's interpreter pays by the row")


def rows_for(backend: str, n_rows: int, most: int = INTERPRETED_ROWS) -> Tensor:
    """All rows; for the interpreter a few, the first and the last of them."""
    few = min(n_rows, most) if interpreted(backend) else n_rows
    return torch.linspace(0, n_rows - 1, few).long()


def moved(value: Any, to: str) -> Any:
    """Tensors, and those in lists, tuples, dicts and dataclasses, on a device."""
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
    """The backend's own function, for tensors of its device."""
    if backend in TILES:
        return functools.partial(_loss_in_tiles, backend)
    if backend == "triton split":
        return _loss_of_split_rows
    name = dispatch.ADVANTAGE_OPS[0] if operation == "advantages" else operation
    return getattr(importlib.import_module(f"smopd.kernels.{dispatch.MODULES[backend][name]}"), operation)


def _loss_of_split_rows(*arguments: Any) -> TokenTerms:
    """Aligned rows in parts of 32 lanes, so that a small vocabulary has several."""
    from smopd.kernels.triton import loss

    small = {"_SPLIT_LANES": 32, "_SPLIT_VECTORS": 3, "_splits": lambda *_, **__: True}
    with mock.patch.multiple(loss, **small):
        return loss.loss_rows(*arguments)


def call(backend: str, operation: str, *arguments: Any, **options: Any) -> Any:
    """The result on the CPU, for arguments of the CPU."""
    need(backend)
    there = moved((arguments, options), device(backend))
    return moved(function(backend, operation)(*there[0], **there[1]), "cpu")


def cuts(n: int, *inner: int) -> list[tuple[int, int]]:
    return list(itertools.pairwise([0, *(cut for cut in inner if cut < n), n]))


def tiles_of(
    n_rows: int, n_vocab: int, *, few: bool = False
) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Narrow ones, one of a row, and one that begins where no vector does."""
    columns = (1, 2051) if few else (1, 2, 2048, 2052)
    return list(itertools.product(cuts(n_vocab, *columns), cuts(n_rows, 5, 6)))


def _loss_in_tiles(
    backend: str, logits_NV: Tensor, tokens: LossTokens, settings: LossSettings, grad_NV: Tensor | None
) -> TokenTerms:
    passes = importlib.import_module(f"smopd.kernels.{TILES[backend]}").TileLoss
    plan = passes.plan_of(tokens, settings, logits_NV.dtype)
    sums_CN, tiles = plan.empty_sums(), tiles_of(*logits_NV.shape, few=interpreted(backend))
    for (first, last), (start, stop) in tiles:
        passes(plan).scan(sums_CN, logits_NV[start:stop, first:last], start, first)
    merged = finish(plan, sums_CN)
    if grad_NV is not None:
        if grad_NV is not logits_NV:
            grad_NV.copy_(logits_NV)
        for (first, last), (start, stop) in tiles:
            passes(plan).gradient_(merged, grad_NV[start:stop, first:last], start, first)
    return merged.terms


def same(some: Any, others: Any) -> bool:
    """Bit for bit, NaN being itself: tensors, tuples and dataclasses of them."""
    if isinstance(some, Tensor):
        equal = (some == others) | (some.isnan() & others.isnan())
        return some.shape == others.shape and some.dtype == others.dtype and bool(equal.all())
    if is_dataclass(some) and not isinstance(some, type):
        some, others = ([getattr(value, f.name) for f in fields(some)] for value in (some, others))
    if isinstance(some, (tuple, list)):
        return all(map(same, some, others)) and len(some) == len(others)
    return some == others
