"""Our checker of BFCL's AST categories: are the calls of a response those that the answers allow?

An answer names a function and lists, for each parameter, the values that are right; "" among them means that
the parameter may be left out. The rules are the published ones of BFCL v4, including their narrow places:
types are compared exactly (a bool is no integer; an integer is a float in Python, but not inside a list),
strings without case, spaces and ,./-_*^ (also in a list and as a dict's values, deeper exactly), parallel
calls greedily.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from smopd.evals.bfcl.types import TYPES, java_value, javascript_value, language_of

OPTIONAL = ""
_IGNORED = str.maketrans("'", '"', " ,./-_*^")

Function = Mapping[str, Any]
"""A described function: `name`, `parameters` with `properties` and `required`."""
Answer = Mapping[str, Mapping[str, Sequence[Any]]]
"""One function's name -> parameter -> allowed values."""


class Call(NamedTuple):
    """One call of a response."""

    name: str
    arguments: dict[str, Any]


def find_mistake(
    functions: Sequence[Function],
    calls: Sequence[Call],
    answers: Sequence[Answer],
    category: str,
    *,
    underscores: bool = False,
) -> str | None:
    """The first mistake of a response, `kind: what`, or None where it is right.

    Args:
        functions: as described to the model, before anything was rewritten for a prompt.
        calls: in the response's order. Values are JSON; in Java and JavaScript strings of source.
        answers: those expected: one, or for the parallel categories several, in any order.
        category: with its name come the language and whether calls are parallel.
        underscores: a function a.b was shown, and must be called, as a_b.
    """
    if len(calls) != len(answers):
        return f"count: {len(calls)} calls, expected {len(answers)}"
    described = {function["name"]: function for function in reversed(functions)}
    language = language_of(category)
    left = list(calls)
    for answer in answers:
        (name, allowed), *_ = answer.items()
        function = described[name] if "parallel" in category or "multiple" in category else functions[0]
        mistakes = [_call_mistake(function, call, allowed, language, underscores) for call in left]
        if None not in mistakes:
            return str(mistakes[0]) if len(answers) == 1 else f"call: none is right for {name}"
        del left[mistakes.index(None)]
    return None


def _call_mistake(
    function: Function, call: Call, allowed: Mapping[str, Sequence[Any]], language: str, underscores: bool
) -> str | None:
    name = function["name"].replace(".", "_") if underscores else function["name"]
    if call.name != name:
        return f"name: {call.name}, expected {name}"
    declared = function["parameters"]["properties"]
    for parameter in function["parameters"]["required"]:
        if parameter not in call.arguments:
            return f"missing: {parameter} is required"
    for parameter, value in call.arguments.items():
        if parameter not in declared or parameter not in allowed:
            return f"unexpected: {parameter}"
        mistake = value_mistake(value, allowed[parameter], declared[parameter], language)
        if mistake is not None:
            return f"{mistake}: {parameter}"
    for parameter, values in allowed.items():
        if parameter not in call.arguments and OPTIONAL not in values:
            return f"missing: {parameter} is expected"
    return None


def value_mistake(
    value: Any, allowed: Sequence[Any], declared: Mapping[str, Any], language: str
) -> str | None:
    """`type` or `value`, or None where a parameter's value is right."""
    if language != "python" and not isinstance(value, str):
        return "type"
    types, kind, element = TYPES[language], declared["type"], element_type(declared, language)
    element_kind = types[element] if element is not None else None
    return _read_mistake(_read(value, kind, element, language), allowed, types[kind], element_kind)


def _read(value: Any, kind: str, element: str | None, language: str) -> Any:
    if language == "java":
        return java_value(value, kind, element)
    if language == "javascript":
        return javascript_value(value, kind, element)
    if kind == "tuple" and isinstance(value, tuple):
        return list(value)
    if kind == "float" and type(value) is int and abs(value) < 2**1023:
        return float(value)
    return value


def element_type(declared: Mapping[str, Any], language: str) -> str | None:
    """The declared type of a list's elements; None where it is no list."""
    lists = {"python": ("array", "tuple"), "java": ("Array", "ArrayList"), "javascript": ("array",)}
    return declared["items"]["type"] if declared["type"] in lists[language] else None


def _read_mistake(value: Any, allowed: Sequence[Any], kind: type, element_kind: type | None) -> str | None:
    fits, is_variable = _has_type(value, allowed, kind, element_kind)
    if not fits:
        return "type"
    if is_variable:
        right = value in allowed
    elif kind is dict:
        right = any(_dict_fits(value, option) for option in allowed)
    elif element_kind is dict:
        right = any(_dicts_fit(value, option) for option in allowed)
    elif kind is str:
        right = normalise(value) in [normalise(option) for option in allowed if isinstance(option, str)]
    elif kind is list:
        # An optional list, "", is an empty one.
        right = [normalise(item) for item in value] in [
            [normalise(item) for item in option] for option in allowed if isinstance(option, (list, str))
        ]
    else:
        right = value in allowed
    return None if right else "value"


def _has_type(value: Any, allowed: Sequence[Any], kind: type, element_kind: type | None) -> tuple[bool, bool]:
    """Whether a value has the declared type or, as a variable would, that of the first allowed value.

    The second is whether it counts as a variable: it, or what is allowed, has another than the declared type.
    """
    found, expected = type(value), next((type(option) for option in allowed if option != OPTIONAL), None)
    if found is not kind:
        return found is expected, True
    fits = element_kind is None or any(
        not isinstance(option, list) or all(_has_type(item, option, element_kind, None)[0] for item in value)
        for option in allowed
    )
    return fits, expected is not None and expected is not kind


def _dict_fits(value: Any, option: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(option, dict):
        return False
    return all(
        key in option and normalise(item) in [normalise(each) for each in option[key]]
        for key, item in value.items()
    ) and all(key in value or OPTIONAL in values for key, values in option.items())


def _dicts_fit(value: Sequence[Any], option: Any) -> bool:
    return (
        isinstance(option, (list, str))
        and len(value) == len(option)
        and all(_dict_fits(item, expected) for item, expected in zip(value, option, strict=True))
    )


def normalise(value: Any) -> Any:
    """A string without case, spaces and ,./-_*^ and with one kind of quote; anything else as it is."""
    return value.translate(_IGNORED).lower() if isinstance(value, str) else value
