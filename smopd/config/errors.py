"""Says what is wrong with settings: a line for every mistake, with its place and the right name."""

from __future__ import annotations

import difflib
import json
import re
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from smopd.config.recipe import Keys, dotted
from smopd.config.renamed import renamed
from smopd.config.settings import Settings
from smopd.engine.settings import ImportPath
from smopd.names import nearest

_NAMES = {
    int: "integer",
    float: "number",
    str: "text",
    bool: "true|false",
    type(None): "null",
    Any: "anything",
}
_BOUNDS = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}
_OWN_PATH = re.compile(r"([\w-]+(?:\.[\w-]+)*): (.*)")
_LONGEST_VALUE = 60


def explain(error: ValidationError, origin: dict[Keys, str], prefix: Keys = ()) -> list[str]:
    """One line a mistake: `file:line: path.to.setting: got this, expected that`.

    Args:
        error: from validating `Settings`.
        origin: where each setting was given.
        prefix: put before each path, for settings that stand elsewhere (`runs.NAME.set`).
    """
    lines: dict[str, None] = {}
    for detail in error.errors(include_url=False):
        loc = detail["loc"]
        keys, kind = locate(loc)
        in_union = len(keys) < len(loc)
        for text in _message(detail, keys, kind, in_union).split("\n"):
            own = _OWN_PATH.fullmatch(text) if detail["type"] == "value_error" else None
            inner: Keys = tuple(own[1].split(".")) if own else ()
            lines[line((*prefix, *keys, *inner), own[2] if own else text, origin)] = None
    return list(lines)


def line(keys: Keys, text: str, origin: dict[Keys, str]) -> str:
    """`file:line: path: text`, with the line of the nearest setting around `keys` that was given."""
    known = tuple(int(key) if str(key).isdigit() else key for key in keys)
    at = next((origin[known[:n]] for n in range(len(known), 0, -1) if known[:n] in origin), None)
    return ": ".join(part for part in (at, dotted(keys), text) if part)


def locate(loc: Keys) -> tuple[Keys, Any]:
    """The part of an error's location that names a setting (no union branches), and the setting's type."""
    kind: Any = Settings
    for i, key in enumerate(loc):
        inside = _inside(kind, key)
        if inside is None:
            unknown = isinstance(_bare(kind), type) and issubclass(_bare(kind), BaseModel)
            return (loc[: i + 1], None) if unknown else (loc[:i], kind)
        kind = inside
    return loc, kind


def kind_text(kind: Any) -> str:
    """A type as a person writes it: `integer`, `responses|tokens|none`, `[number, number]|batch|null`."""
    origin, args = get_origin(kind), get_args(kind)
    if kind is ImportPath:
        return "package.module:function"
    if origin is Annotated:
        return kind_text(args[0])
    if origin is Literal:
        return "|".join(str(arg) for arg in args)
    if origin in (Union, types.UnionType):
        return "|".join(kind_text(arg) for arg in args)
    if origin is list:
        return f"[{kind_text(args[0])}, ...]"
    if origin is tuple:
        return "[" + ", ".join(kind_text(arg) for arg in args) + "]"
    if origin is dict or (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return "a section"
    return _NAMES.get(kind, getattr(kind, "__name__", str(kind)))


def settings_paths(model: type[BaseModel] = Settings, before: str = "") -> Iterator[tuple[str, str]]:
    """(dotted path, last name) of every setting outside lists and dictionaries."""
    for name, field in model.model_fields.items():
        yield before + name, name
        kind = _bare(field.annotation)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from settings_paths(kind, f"{before}{name}.")


def child(kind: Any, key: str) -> tuple[str, Any]:
    """The setting `key` of a section of type `kind`, hyphens read as underscores, and its type or None."""
    for name in (key, key.replace("-", "_")):
        inside = _inside(kind, name)
        if inside is not None:
            return name, inside
    return key, None


def section_of(kind: Any) -> type[BaseModel] | None:
    """The section that a setting is, or that its entries are (of a list or dictionary)."""
    kind = _bare(kind)
    if get_origin(kind) in (list, dict):
        kind = get_args(kind)[-1]
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _message(detail: ErrorDetails, keys: Keys, kind: Any, in_union: bool) -> str:
    error, value = detail["type"], detail["input"]
    context = detail.get("ctx", {})
    if (now := renamed(keys, value)) is not None:
        return now
    if error == "extra_forbidden":
        return "no such setting" + _right_name(keys)
    if error == "value_error" and not in_union:
        return str(context["error"])
    if error == "missing" and not in_union:
        return f"missing, expected {kind_text(kind)}"
    got = json.dumps(value, default=str, ensure_ascii=False)
    if len(got) > _LONGEST_VALUE:
        got = got[:_LONGEST_VALUE] + "..."
    if error in _BOUNDS:
        name, words = _BOUNDS[error]
        return f"got {got}, expected {words} {context[name]:g}"
    if error == "finite_number":
        return f"got {got}, expected a finite number"
    if error == "too_short":
        return f"got {got}, expected at least {context['min_length']}"
    expected = kind_text(kind)
    near = nearest(value, expected.split("|")) if isinstance(value, str) and "|" in expected else ""
    return f"got {got}, expected {expected}{near}"


def _right_name(keys: Keys) -> str:
    name = str(keys[-1])
    around = locate(keys[:-1])[1]
    fields = list(_bare(around).model_fields)
    elsewhere = [path for path, last in settings_paths() if last == name]
    close = difflib.get_close_matches(name, fields, 1, 0.6)
    if close:
        elsewhere = [dotted((*keys[:-1], close[0]))]
    return f"; did you mean {' or '.join(elsewhere)}?" if elsewhere else f"; there are {', '.join(fields)}"


def _bare(kind: Any) -> Any:
    """`kind` without `| None` and annotations."""
    if get_origin(kind) is Annotated:
        return _bare(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        rest = [arg for arg in get_args(kind) if arg is not type(None)]
        return _bare(rest[0]) if len(rest) == 1 else kind
    return kind


def _inside(kind: Any, key: str | int) -> Any:
    """The type of `key` in a section, list or dictionary; None where there is none."""
    kind = _bare(kind)
    origin, args = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        field = kind.model_fields.get(str(key))
        return field.annotation if field else None
    if origin is dict:
        return args[1]
    if origin in (list, tuple) and str(key).isdigit():
        return args[min(int(key), len(args) - 1)]
    return None
