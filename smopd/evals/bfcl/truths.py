"""The perfect calls of a BFCL item, and the few answers of the data that no response could meet, mended.

Six of BFCL v4's 2,501 AST items are right with no response at all, under bfcl-eval as under our checker:
live_multiple_862 and 964 ask for a parameter that the function does not have, live_simple_106 and 112 allow
no value for required lists, and simple_java_36 and 65 ask for a list of strings, numbers and booleans whose
elements are read as text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from smopd.evals.bfcl.checker import OPTIONAL, Answer, Call, Function, element_type, value_mistake
from smopd.evals.bfcl.types import TYPES, language_of

_JAVA_SUFFIXES = {"long": "L", "float": "f"}


def perfect_calls(
    functions: Sequence[Function], answers: Sequence[Answer], category: str, *, underscores: bool = False
) -> list[Call]:
    """One call for each answer, in their order; parameters that may only be left out are left out."""
    language = language_of(category)
    described = {function["name"]: function for function in reversed(functions)}
    calls = []
    for answer in answers:
        for name, allowed in answer.items():
            function = described.get(name, functions[0])
            declared = function["parameters"]["properties"]
            arguments = {}
            for parameter, values in allowed.items():
                options = [value for value in values if value != OPTIONAL]
                if not options and parameter in function["parameters"]["required"]:
                    options = [OPTIONAL, []]
                if options and parameter in declared:  # some answers allow what no function has
                    arguments[parameter] = _perfect(options, values, declared[parameter], language)
            shown = function["name"].replace(".", "_") if underscores else function["name"]
            calls.append(Call(shown, arguments))
    return calls


def mended(functions: Sequence[Function], answers: Sequence[Answer], category: str) -> list[Answer] | None:
    """The answers so that they can be met, or None where they can be as they are.

    A parameter that the function lacks takes the place of the required one that the answer lacks, or else is
    not asked for. Where no value is allowed, an empty list is. A Java list of elements of type `any` may also
    be one of texts, its strings with quotes or without.
    """
    described = {function["name"]: function for function in reversed(functions)}
    found: list[Answer] = []
    for answer in answers:
        for name, allowed in answer.items():
            parameters = described[name]["parameters"]
            declared = parameters["properties"]
            foreign = [key for key in allowed if key not in declared and OPTIONAL not in allowed[key]]
            lacking = [key for key in parameters["required"] if key not in allowed]
            renamed = dict(zip(foreign, lacking, strict=True)) if len(foreign) == len(lacking) else {}
            found.append(
                {
                    name: {
                        renamed.get(key, key): [
                            *(values or [[]]),
                            *_as_texts(values, declared.get(key), category),
                        ]
                        for key, values in allowed.items()
                        if key not in foreign or key in renamed
                    }
                }
            )
    return None if found == list(answers) else found


def _as_texts(values: Sequence[Any], declared: Mapping[str, Any] | None, category: str) -> list[list[str]]:
    if language_of(category) != "java" or not declared or element_type(declared, "java") != "any":
        return []
    texts: list[list[str]] = []
    for value in values:
        if isinstance(value, list) and not all(isinstance(item, str) for item in value):
            texts.append([java_source(item, "any", None) for item in value])
            texts.append([_quoted(item) for item in value])
    return texts


def _perfect(
    options: Sequence[Any], allowed: Sequence[Any], declared: Mapping[str, Any], language: str
) -> Any:
    element = element_type(declared, language)
    written = []
    for option in options:
        value = _chosen(option, TYPES[language][declared["type"]], element)
        if language == "java":
            value = java_source(value, declared["type"], element)
        elif language == "javascript":
            value = javascript_source(value, declared["type"])
        if value_mistake(value, allowed, declared, language) is None:
            return value
        written.append(value)
    return written[0]


def _chosen(option: Any, kind: type, element: str | None) -> Any:
    """Of a dict, and of each dict in a list, the first allowed values; of anything else, itself."""
    if kind is dict and isinstance(option, dict):
        return _chosen_dict(option)
    if element == "dict" and isinstance(option, list):
        return [_chosen_dict(item) if isinstance(item, dict) else item for item in option]
    return option


def _chosen_dict(option: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    chosen = {}
    for key, values in option.items():
        if given := [value for value in values if value != OPTIONAL]:
            chosen[key] = given[0]
    return chosen


def java_source(value: Any, declared: str, element: str | None) -> str:
    """Source that `bfcl_types.java_value` reads as `value`: strings of arrays, and of `any`, as they are."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list) and declared == "Array":
        return f"new {element}[]{{{', '.join(str(item) for item in value)}}}"
    if isinstance(value, list):
        write = _quoted if element in ("String", "char") else str
        items = ", ".join(f"{write(item)}{_JAVA_SUFFIXES.get(element or '', '')}" for item in value)
        return f"new ArrayList<>(Arrays.asList({items}))"
    if isinstance(value, dict):
        puts = " ".join(f'put("{key}", {_quoted(item)});' for key, item in value.items())
        return f"new HashMap<String, Object>() {{{{ {puts} }}}}"
    return str(value) if isinstance(value, str) else f"{value}{_JAVA_SUFFIXES.get(declared, '')}"


def javascript_source(value: Any, declared: str) -> str:
    """Source that `bfcl_types.javascript_value` reads as `value`."""
    if isinstance(value, str):
        return value
    return f"{value}n" if declared == "Bigint" else json.dumps(value, ensure_ascii=False)


def _quoted(item: Any) -> str:
    if isinstance(item, bool):
        return str(item).lower()
    return f'"{item}"' if isinstance(item, str) else str(item)
