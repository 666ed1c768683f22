"""The parts of a benchmark: cases (sizes), providers (implementations) and expected results."""

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
    """Sizes of a run. Unused sizes are 0."""

    N: int
    V: int = 0
    D: int = 0
    M: int = 0
    K: int = 0
    G: int = 0
    kappa: int = 0
    dtype: str = "float32"
    flags: tuple[str, ...] = ()
    repeats: int | None = None  # a fixed number for slow calls
    main: bool = False  # also run the providers with main_only

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
    """A true result in float64, and the bound of the error of our results.

    Attributes:
        value: the true values of the rows `rows` (None: all rows).
        bound: limit of the absolute error. With norm=True, limit of the error's norm relative to value's.
        of: function to apply to the provider's tensor first.
        exact: mask of places where our results must equal value. Other providers are not compared.
    """

    value: Tensor
    bound: float | Tensor = 0.0
    rows: Tensor | None = None
    norm: bool = False
    exact: Tensor | None = None
    of: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True, kw_only=True)
class Provider:
    """An implementation of the operation.

    Attributes:
        run: the timed call. It maps the inputs, or the result of prepare, to named tensors.
        kind: eager (what users have today), compile, ours, peer.
        prepare: called before every run, and not timed.
        backend: value of SMOPD_BACKEND during the call.
        module: the module that must be installed.
        note: what it computes, if not the whole operation.
        main_only: run only the main cases.
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
    """Return a provider of the public operation for each backend."""
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
    """Return a provider of another library's function. `run` imports the library."""
    return Provider(name=name, run=run, kind="peer", module=module, note=note, **options)


def compiled(run: Callable[[Any], Outputs]) -> Provider:
    """Return a provider that runs a form made by compiling()."""
    return Provider(name="torch.compile", run=run, kind="compile", main_only=True)


def compiling(form: Callable) -> Callable:
    """Return a function that applies torch.compile to an eager form and its backward at the first call."""
    compile_once = functools.cache(lambda: torch.compile(form, dynamic=False))
    return lambda *arguments: compile_once()(*arguments)


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """A library call that moves the same bytes or does the same operations. Its time is a lower bound."""

    name: str
    run: Callable[[], Any]
    bytes: int = 0
    flops: int = 0


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A table of cases and providers.

    Attributes:
        cases: the cases for "cpu" and "cuda".
        inputs: returns the inputs of all providers for a case on a device.
        truth: returns the expected outputs by name. A provider returns some of them.
        launch_bound: on a GPU, also time a replayed CUDA graph.
    """

    cases: Mapping[str, tuple[Case, ...]]
    inputs: Callable[[Case, str], Any]
    truth: Callable[[Any], dict[str, Expected]]
    providers: tuple[Provider, ...]
    ceiling: Callable[[Any], Ceiling]
    launch_bound: bool = False
