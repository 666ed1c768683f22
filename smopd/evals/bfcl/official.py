"""BFCL's own data, prompts and AST checker, from the package bfcl-eval.

The package pins the client libraries of every vendor; `pip install --no-deps` is enough here. Its checker
imports the registry of models, and with it those libraries, only to ask whether a model writes underscores.
So its files are loaded as private modules, with a registry of two names in the registry's place.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

PACKAGE = "bfcl_eval"
INSTALL = "pip install --no-deps bfcl-eval==2026.3.23"
# Ours: the package's patterns for Java take the cube of a value's length, and the longest answer has 152.
MAX_SOURCE_CHARS = 1_000
_REGISTRY = f"{PACKAGE}.constants.model_config"
_DOTS, _UNDERSCORES = "dots", "underscores"

Function = Mapping[str, Any]
"""A described function: `name`, `description`, and `parameters` with `properties` and `required`."""
Answer = Mapping[str, Mapping[str, Sequence[Any]]]
"""One function's name -> parameter -> allowed values; "" among them allows to leave the parameter out."""


class Call(NamedTuple):
    """One call of a response."""

    name: str
    arguments: dict[str, Any]


def language_of(category: str) -> str:
    """python, java or javascript."""
    if "javascript" in category:
        return "javascript"
    return "java" if "java" in category else "python"


def find_mistake(
    functions: Sequence[Function],
    calls: Sequence[Call],
    answers: Sequence[Answer],
    category: str,
    *,
    underscores: bool = False,
) -> str | None:
    """The checker's first error of a response, or None where it is right.

    Args:
        functions: as in the data.
        calls: in the response's order; in Java and JavaScript values are strings of source.
        answers: those expected: one, or several in any order in the parallel categories.
        category: names the language and whether calls are parallel.
        underscores: a function a.b was shown, and must be called, as a_b.
    """
    language = language_of(category)
    longest = max((len(str(value)) for call in calls for value in call.arguments.values()), default=0)
    if language != "python" and longest > MAX_SOURCE_CHARS:
        return f"a value of {longest} characters, expected at most {MAX_SOURCE_CHARS}"
    checker = load_module("eval_checker/ast_eval/ast_checker.py")
    try:
        verdict = checker.ast_checker(
            functions,
            [{call.name: call.arguments} for call in calls],
            answers,
            checker.Language(language),
            category,
            _UNDERSCORES if underscores else _DOTS,
        )
    except Exception as error:  # the checker assumes types that a response need not have
        return f"{type(error).__name__} in the checker"
    return None if verdict["valid"] else str(verdict["error_type"])


def folder() -> Path:
    """The installed package.

    Raises:
        ValueError: it is not installed; names the command that installs it.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"bfcl: needs the package bfcl-eval, expected `{INSTALL}`")
    return Path(next(iter(spec.submodule_search_locations)))


def installed_version() -> str:
    return version("bfcl-eval")


@cache
def load_module(path: str) -> Any:
    """A file of the package as a private module.

    Raises:
        ValueError: the package is not installed, or has no such file.
    """
    file = folder() / path
    if not file.is_file():
        raise ValueError(f"{PACKAGE}: has no {path}, expected `{INSTALL}`")
    registry = ModuleType(_REGISTRY)
    registry.MODEL_CONFIG_MAPPING = {  # type: ignore[attr-defined]
        name: SimpleNamespace(underscore_to_dot=name == _UNDERSCORES) for name in (_DOTS, _UNDERSCORES)
    }
    loaded = sys.modules.get(_REGISTRY)
    sys.modules[_REGISTRY] = registry
    try:
        spec = importlib.util.spec_from_file_location(f"_smopd_{file.stem}", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        if loaded is None:
            del sys.modules[_REGISTRY]
        else:
            sys.modules[_REGISTRY] = loaded
    return module
