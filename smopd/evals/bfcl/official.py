"""BFCL's own AST checker, from the package `bfcl-eval` where it is installed: the reference scorer.

The checker imports the package's registry of models only to ask whether a model needs underscores in names,
and the registry imports the client libraries of every vendor. So the checker is loaded as a private module
with a registry of two names in its place: `pip install --no-deps bfcl-eval` is enough.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from smopd.evals.bfcl.checker import Answer, Call, Function
from smopd.evals.bfcl.types import language_of

PACKAGE = "bfcl_eval"
_REGISTRY = f"{PACKAGE}.constants.model_config"
_DOTS, _UNDERSCORES = "dots", "underscores"


def is_installed() -> bool:
    """Whether the package can be imported, without importing it."""
    return importlib.util.find_spec(PACKAGE) is not None


def find_mistake(
    functions: Sequence[Function],
    calls: Sequence[Call],
    answers: Sequence[Answer],
    category: str,
    *,
    underscores: bool = False,
) -> str | None:
    """As `smopd.evals.bfcl.checker.find_mistake`; a response that the package's checker fails on is wrong."""
    checker = load_module("eval_checker/ast_eval/ast_checker.py")
    try:
        verdict = checker.ast_checker(
            functions,
            [{call.name: call.arguments} for call in calls],
            answers,
            checker.Language(language_of(category)),
            category,
            _UNDERSCORES if underscores else _DOTS,
        )
    except Exception as error:  # it assumes types that a response need not have
        return f"bfcl-eval: {type(error).__name__}"
    return None if verdict["valid"] else f"bfcl-eval: {verdict['error_type']}"


@cache
def load_module(path: str) -> Any:
    """A file of the package as a module of our own.

    Raises:
        ValueError: the package is not installed, or has no such file.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"{PACKAGE}: is not installed, expected `pip install --no-deps bfcl-eval`")
    file = Path(next(iter(spec.submodule_search_locations))) / path
    if not file.is_file():
        raise ValueError(f"{PACKAGE}: has no {path}, expected a version of BFCL v4")
    registry = ModuleType(_REGISTRY)
    registry.MODEL_CONFIG_MAPPING = {  # type: ignore[attr-defined]
        name: SimpleNamespace(underscore_to_dot=name == _UNDERSCORES) for name in (_DOTS, _UNDERSCORES)
    }
    loaded = sys.modules.get(_REGISTRY)
    sys.modules[_REGISTRY] = registry
    try:
        module_spec = importlib.util.spec_from_file_location(f"_smopd_{Path(path).stem}", file)
        assert module_spec is not None and module_spec.loader is not None
        module = importlib.util.module_from_spec(module_spec)
        module_spec.loader.exec_module(module)
    finally:
        if loaded is None:
            del sys.modules[_REGISTRY]
        else:
            sys.modules[_REGISTRY] = loaded
    return module
