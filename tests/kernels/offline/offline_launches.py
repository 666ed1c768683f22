"""Recording of launches, with tensors as Pointer so that another process can compile them."""

import ast
import hashlib
import importlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton.language as tl
from triton.language import constexpr
from triton.runtime.jit import JITFunction

CAPABILITIES = (80, 90, 100)
MEASURED = Path(__file__).with_name("offline_code.py")  # part of the digest: it reads the machine code


@dataclass(frozen=True)
class Pointer:
    """A tensor argument: name of its dtype and whether it is aligned to 16 bytes."""

    dtype: str
    aligned: bool


@dataclass(frozen=True)
class Launch:
    """A launch of the kernel "module:name" by the call `case`."""

    kernel: str
    case: str
    arguments: tuple
    options: tuple[tuple[str, Any], ...]
    capability: int

    @property
    def name(self) -> str:
        return f"{self.kernel.partition(':')[2]} {self.case} sm_{self.capability}"

    @property
    def digest(self) -> str:
        """Return the digest of the source, its specialization and offline_code.py."""
        kernel = kernel_of(self)
        what = (variant(self, kernel), sources(kernel), _code(MEASURED.read_text()))
        return hashlib.sha256(repr(what).encode()).hexdigest()[:16]


def noted(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        offset = value.storage_offset() * value.element_size()
        return Pointer(str(value.dtype).removeprefix("torch."), offset % 16 == 0)
    if isinstance(value, tuple | list):
        return tuple(map(noted, value))
    return value


def variant(launch: Launch, kernel: JITFunction) -> tuple:
    """Return a key that is equal for launches that Triton compiles alike; integers count by their class."""
    constant = {p.name for p in kernel.params if p.is_constexpr}
    unspecialized = {p.name for p in kernel.params if p.do_not_specialize}
    values = dict(zip(kernel.arg_names, launch.arguments, strict=False)) | dict(launch.options)

    def classed(value: Any, special: bool = True) -> Any:
        if isinstance(value, bool) or value is None or isinstance(value, Pointer | str):
            return value
        if isinstance(value, int):
            return ("int", special and value == 1, special and value % 16 == 0, abs(value) >= 2**31)
        if isinstance(value, tuple):
            return tuple(map(classed, value))
        return type(value).__name__

    options = {name: value for name, value in values.items() if name not in kernel.arg_names}
    exact = {name: repr(value) for name, value in values.items() if name in constant} | options
    loose = {
        name: classed(value, name not in unspecialized) for name, value in values.items() if name not in exact
    }
    return launch.kernel, launch.capability, repr(sorted(exact.items())), repr(sorted(loose.items()))


@contextmanager
def noting(launches: list[Launch], case: list[str], capability: int) -> Iterator[None]:
    """Record launches in a context in which CUDA reports a device of this capability."""

    def run(self: JITFunction, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        name = f"{self.fn.__module__}:{self.fn.__name__}"
        kept = tuple(sorted((key, noted(value)) for key, value in options.items()))
        launches.append(Launch(name, case[0], noted(arguments), kept, capability))

    properties = SimpleNamespace(
        multi_processor_count=132, major=capability // 10, minor=capability % 10, L2_cache_size=50 << 20
    )
    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(torch.cuda, "get_device_properties", lambda *_: properties),
        mock.patch.object(torch.cuda, "get_device_capability", lambda *_: divmod(capability, 10)),
        mock.patch.object(torch.cuda, "_exchange_device", lambda index: index),
        mock.patch.object(torch.cuda, "_maybe_exchange_device", lambda index: index),
        mock.patch.object(torch.cuda, "current_device", lambda: 0),
    ):
        yield


def launches_of(cases: Callable[[int], Iterator[tuple[str, Callable[[], Any]]]]) -> list[Launch]:
    """Return the distinct launches of the cases for each capability."""
    distinct: dict[tuple, Launch] = {}
    for architecture, capability in enumerate(CAPABILITIES):
        made: list[Launch] = []
        current = [""]
        with noting(made, current, capability), torch.no_grad():
            for label, call in cases(architecture):
                current[0] = label
                call()
        for launch in made:
            distinct.setdefault(variant(launch, kernel_of(launch)), launch)
    met: Counter[str] = Counter()
    apart = []
    for launch in distinct.values():
        met[launch.name] += 1
        number = met[launch.name]  # a case's second launch of a kernel is "case #2"
        apart.append(launch if number == 1 else replace(launch, case=f"{launch.case} #{number}"))
    return apart


def kernel_of(launch: Launch) -> JITFunction:
    module, _, name = launch.kernel.partition(":")
    return getattr(importlib.import_module(module), name)


@cache
def sources(kernel: JITFunction) -> str:
    """Return code, options, defaults and constants of a kernel and all functions it calls, except Triton's.

    Triton's `cache_key` depends on the order of requests.
    """
    found: dict[str, str] = {}
    reached = [kernel]
    while reached:
        function = reached.pop()
        module = function.fn.__module__
        name = f"{module}:{function.fn.__qualname__}"
        if name in found or _is_tritons(module):
            continue
        if function.fn.__closure__:
            raise TypeError(f"{name} has a closure, which is not followed here")
        spelled = {node.id for node in ast.walk(function.parse()) if isinstance(node, ast.Name)}
        used = {key: value for key, value in sorted(function.fn.__globals__.items()) if key in spelled}
        own = {key for key in used if key in function.arg_names}  # the argument hides it
        constants = {key: value for key, value in used.items() if isinstance(value, constexpr | tl.dtype)}
        functions = {key: value for key, value in used.items() if isinstance(value, JITFunction)}
        modules = {key for key, v in used.items() if isinstance(v, ModuleType) and _is_tritons(v.__name__)}
        if unknown := used.keys() - own - constants.keys() - functions.keys() - modules:
            raise TypeError(f"{name} names {sorted(unknown)}, which are not followed here")
        options = [(p.name, p.is_constexpr, p.do_not_specialize, p.do_not_specialize_on_alignment, p.default)
                   for p in function.params]  # fmt: skip
        found[name] = repr((name, _code(function.src), constants, options, function.debug, function.noinline))
        reached += functions.values()
    return "\n".join(text for _, text in sorted(found.items()))


@cache
def _code(source: str) -> str:
    """Return Python source without comments, docstrings and layout, which do not change machine code."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        documented = isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module)
        if documented and ast.get_docstring(node, clean=False):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def _is_tritons(module: str) -> bool:
    return module.partition(".")[0] == "triton"


def shipped_kernels(modules: Sequence[str]) -> set[str]:
    """Return "module:name" of every kernel of these modules."""
    return {
        f"{module}:{name}"
        for module in modules
        for name, value in vars(importlib.import_module(module)).items()
        if isinstance(value, JITFunction) and name.endswith("_kernel") and value.fn.__module__ == module
    }
