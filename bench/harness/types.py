"""What a benchmark is made of: cases (sizes), providers (what is timed), and what their results should be.

Shapes: N tokens, V vocabulary, D hidden, M teachers, R responses, K rewards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

Outputs: TypeAlias = "dict[str, Tensor]"

BACKEND_DEVICES = {"reference": ("cpu", "cuda"), "cpp": ("cpu",), "triton": ("cuda",)}
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes of one run; a field that a benchmark does not use stays 0."""

    N: int
    V: int = 0
    D: int = 0
    M: int = 0
    K: int = 0
    G: int = 0
    kappa: int = 0
    dtype: str = "float32"
    flags: tuple[str, ...] = ()
    repeats: int | None = None  # a fixed number where one call takes long
    main: bool = False  # the case that compiled and other costly providers take part in

    @property
    def label(self) -> str:
        sizes = [f"{name}{value}" for name in "NVDMKG" if (value := getattr(self, name))]
        kappa = [f"kappa{self.kappa}"] if self.kappa else []
        return "-".join([*sizes, *kappa, SHORT[self.dtype], *self.flags])

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


@dataclass(frozen=True, eq=False)
class Expected:
    """A result in float64 and how far from it one of ours may be.

    Attributes:
        value: the truth, for the rows of `rows` or for all of them.
        bound: of the absolute difference, a number or a tensor like value; with norm=True of the norm of
            the difference over the norm of value.
        rows: indices along the first dimension that value stands for; None: all.
        of: applied to the provider's tensor before the comparison (and before `rows`).
        exact: equality is demanded of our own providers where `exact` is True, and nothing of others.
    """

    value: Tensor
    bound: float | Tensor = 0.0
    rows: Tensor | None = None
    norm: bool = False
    exact: Tensor | None = None
    of: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True, kw_only=True)
class Provider:
    """One way to compute the operation.

    Attributes:
        run: the timed call, from the inputs (or what prepare made of them) to named tensors.
        kind: eager (what users have today), compile, ours, peer.
        prepare: called before every call, not timed: a buffer that the call overwrites, an autograd leaf.
        backend: SMOPD_BACKEND during the call.
        devices: where it can run.
        module: what has to be importable.
        note: what it computes, where that is not the whole operation.
        main_only: runs in main cases only.
    """

    name: str
    run: Callable[[Any], Outputs]
    kind: str = "eager"
    prepare: Callable[[Any], Any] | None = None
    backend: str = ""
    devices: tuple[str, ...] = ("cpu", "cuda")
    module: str = ""
    note: str = ""
    main_only: bool = False


def ours(
    run: Callable[[Any], Outputs],
    variant: str = "",
    *,
    prepare: Callable[[Any], Any] | None = None,
    backends: Iterable[str] = BACKEND_DEVICES,
) -> tuple[Provider, ...]:
    """The public operation, once on each backend."""
    return tuple(
        Provider(
            name=f"{backend} {variant}".strip(),
            run=run,
            kind="ours",
            prepare=prepare,
            backend=backend,
            devices=BACKEND_DEVICES[backend],
        )
        for backend in backends
    )


def peer(name: str, run: Callable[[Any], Outputs], module: str, note: str = "", **options: Any) -> Provider:
    """A library's function; run imports it."""
    return Provider(name=name, run=run, kind="peer", module=module, note=note, **options)


def compiled(run: Callable[[Any], Outputs]) -> Provider:
    """run calls a form made by compiling()."""
    return Provider(name="torch.compile", run=run, kind="compile", main_only=True)


def compiling(form: Callable) -> Callable:
    """torch.compile of an eager form, at its first call; the backward of its result is compiled too."""
    compile_once = functools.cache(lambda: torch.compile(form, dynamic=False))
    return lambda *arguments: compile_once()(*arguments)


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """A timed lower bound that the hardware sets: bytes moved or operations done by the best library call."""

    name: str
    run: Callable[[], Any]
    bytes: int = 0
    flops: int = 0


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A table of cases and providers.

    Attributes:
        cases: for "cpu" and "cuda" the sizes that are reported.
        inputs: what every provider gets of a case on a device.
        truth: the expected outputs, by name; a provider gives any of them.
        ceiling: what `of_ceiling` is a share of.
        launch_bound: on a GPU the replay of a captured graph is timed as well.
    """

    cases: Mapping[str, tuple[Case, ...]]
    inputs: Callable[[Case, str], Any]
    truth: Callable[[Any], dict[str, Expected]]
    providers: tuple[Provider, ...]
    ceiling: Callable[[Any], Ceiling]
    launch_bound: bool = False
