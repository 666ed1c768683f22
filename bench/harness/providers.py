"""Makers of providers: ours on each backend, an eager form compiled, a library's own function."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bench.harness.types import Case, Outputs, Provider

ENV = "SMOPD_BACKEND"
BACKEND_DEVICES = {"reference": ("cpu", "cuda"), "cpp": ("cpu",), "triton": ("cuda",)}


def ours(
    run: Callable[[Any], Outputs],
    variant: str = "",
    *,
    prepare: Callable[[Any], Any] | None = None,
    backends: tuple[str, ...] = ("reference", "cpp", "triton"),
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


def eager(name: str, run: Callable[[Any], Outputs], **options: Any) -> Provider:
    return Provider(name=name, run=run, kind="eager", **options)


def compiled(run: Callable[[Any], Outputs], **options: Any) -> Provider:
    """run calls a form made by compiling()."""
    return Provider(name="torch.compile", run=run, kind="compile", main_only=True, **options)


def compiling(form: Callable) -> Callable:
    """torch.compile of an eager form, at its first call; the backward of its result is compiled too."""
    compile_once = functools.cache(lambda: torch.compile(form, dynamic=False))
    return lambda *arguments: compile_once()(*arguments)


def peer(name: str, run: Callable[[Any], Outputs], *modules: str, note: str = "", **options: Any) -> Provider:
    """A library's function; run imports it."""
    return Provider(name=name, run=run, kind="peer", modules=modules, note=note, **options)


def here(provider: Provider, case: Case, device: str) -> bool:
    """Whether the provider is meant for this device and case."""
    return device in provider.devices and (case.main or not provider.main_only)


def missing(provider: Provider) -> str | None:
    """Why the provider cannot take part, or None."""
    lacking = [module for module in provider.modules if importlib.util.find_spec(module) is None]
    return f"{lacking[0]} is not installed" if lacking else None


@contextmanager
def forced(backend: str | None) -> Iterator[None]:
    """SMOPD_BACKEND is backend inside, unset for None."""
    before = os.environ.pop(ENV, None)
    if backend is not None:
        os.environ[ENV] = backend
    try:
        yield
    finally:
        os.environ.pop(ENV, None)
        if before is not None:
            os.environ[ENV] = before
