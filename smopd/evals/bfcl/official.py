"""BFCL's data folder and AST checker, from the package bfcl-eval.

`pip install --no-deps` is enough. The checker imports the package's model registry, which imports every
vendor's client library. It needs the registry only to know whether a model writes underscores for the dots in
function names. A stub replaces the registry.
"""

import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

PACKAGE = "bfcl_eval"
INSTALL = "pip install --no-deps bfcl-eval==2026.3.23"
# Ours: the package's Java patterns need time cubic in a value's length. True values have <= 152 characters.
MAX_SOURCE_CHARS = 1_000
MODEL = "smopd"

Function = Mapping[str, Any]  # `name`, `description`, `parameters` with `properties` and `required`
# Function -> parameter -> allowed values. "" means that the parameter may be omitted.
Answer = Mapping[str, Mapping[str, Sequence[Any]]]


class Call(NamedTuple):
    name: str
    arguments: dict[str, Any]


def language_of(category: str) -> str:
    """Return the language of a category: python, java or javascript."""
    return {"simple_java": "java", "simple_javascript": "javascript"}.get(category, "python")


def find_mistake(
    functions: Sequence[Function], calls: Sequence[Call], answers: Sequence[Answer], category: str
) -> str | None:
    """Return the checker's first error, or None for a correct response.

    calls: Java and JavaScript arguments are source strings. answers: parallel categories allow any order.
    """
    language = language_of(category)
    longest = max((len(str(value)) for call in calls for value in call.arguments.values()), default=0)
    if language != "python" and longest > MAX_SOURCE_CHARS:
        return f"an argument has {longest} characters, expected at most {MAX_SOURCE_CHARS}"
    checker = _checker()
    called = [{call.name: call.arguments} for call in calls]
    try:
        verdict = checker.ast_checker(functions, called, answers, checker.Language(language), category, MODEL)
    except Exception as error:  # the checker fails on unexpected types
        return f"{type(error).__name__} in the checker"
    return None if verdict["valid"] else str(verdict["error_type"])


@cache
def _checker() -> Any:
    registry: Any = ModuleType("model_config")
    registry.MODEL_CONFIG_MAPPING = {MODEL: SimpleNamespace(underscore_to_dot=False)}
    sys.modules[f"{PACKAGE}.constants.model_config"] = registry
    return importlib.import_module(f"{PACKAGE}.eval_checker.ast_eval.ast_checker")


def folder() -> Path:
    """Return the folder of the installed package, or raise ValueError with the install command."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"bfcl: needs the package bfcl-eval, install it with `{INSTALL}`")
    return Path(next(iter(spec.submodule_search_locations)))
