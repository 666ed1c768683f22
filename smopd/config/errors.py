"""Messages about invalid settings, with file, line and closest valid name, and type names for `--help`."""

import difflib
import json
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from smopd.config.recipe import Keys, dotted
from smopd.config.settings import SHARED, Settings
from smopd.names import nearest

Schema = dict[str, Any]
_KINDS = {"string": "text", "boolean": "true|false", "object": "a section"}
_BOUNDS = {
    "minimum": ">= {:g}",
    "exclusiveMinimum": "> {:g}",
    "maximum": "<= {:g}",
    "exclusiveMaximum": "< {:g}",
    "minItems": "of {:g} or more",
    "minProperties": "of {:g} or more",
    "pattern": "of letters, digits, '_', '-' and '.'",
}
_LONGEST_VALUE = 60
ANSWERS: dict[str, str] = yaml.safe_load(Path(__file__).with_name("renamed.yaml").read_text(encoding="utf-8"))
"""Setting of an earlier version -> error message that follows the setting's path."""


def explain(error: ValidationError, origin: dict[Keys, str], prefix: Keys = ()) -> list[str]:
    """Return a line `file:line: path: got X, expected Y` per mistake. Each path is preceded by `prefix`."""
    texts: dict[Keys, str] = {}
    for detail in error.errors(include_url=False):
        loc = detail["loc"]
        branch = next((i for i, key in enumerate(loc) if "[" in str(key)), len(loc))  # where a union begins
        texts[loc[:branch]] = _message(detail, loc[:branch], branch < len(loc))
    meant = {text.rpartition("; did you mean ")[2] for text in texts.values()}
    missing = {keys for keys, text in texts.items() if text.startswith("missing, ")}
    shown = [keys for keys in texts if not (keys in missing and f"{dotted(keys)}?" in meant)]
    return [line((*prefix, *keys), texts[keys], origin) for keys in shown]


def line(keys: Keys, text: str, origin: dict[Keys, str]) -> str:
    """Return `file:line: path: text`. If `origin` lacks `keys`, the nearest setting's place is used."""
    known = tuple(int(key) if str(key).isdecimal() else key for key in keys)
    around = [origin[known[:n]] for n in range(len(known), 0, -1) if known[:n] in origin]
    inside = [place for given, place in origin.items() if given[: len(known)] == known]
    at = next(iter([*around, *inside]), None)
    return ": ".join(part for part in (at, dotted(keys), text) if part)


@cache
def schemas() -> dict[tuple[str, ...], Schema]:
    """Return the JSON schema of each section, setting and entry, by keys. N is any index, NAME is any key."""
    whole = Settings.model_json_schema()
    found: dict[tuple[str, ...], Schema] = {}

    def walk(keys: tuple[str, ...], schema: Schema) -> None:
        for branch in (schema, *schema.get("anyOf", ())):
            if "$ref" in branch:
                schema = whole["$defs"][branch["$ref"].rpartition("/")[2]] | schema
                schema.pop("anyOf", None)
        found[keys] = schema
        inner = {**schema.get("properties", {}), **dict(enumerate(schema.get("prefixItems", ())))}
        inner |= {"N": schema.get("items"), "NAME": schema.get("additionalProperties")}
        for name, each in inner.items():
            if isinstance(each, dict):
                walk((*keys, str(name)), each)

    walk((), whole)
    return found


def kind(schema: Schema) -> str:
    """Return the type of a setting as text, such as `integer >= 1`, `local|vllm` or `[number, ...]|null`."""
    if "anyOf" in schema:
        return "|".join(kind(branch) for branch in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return "|".join(map(str, schema.get("enum", [schema.get("const")])))
    if "prefixItems" in schema:
        return "[" + ", ".join(kind(item) for item in schema["prefixItems"]) + "]"
    if "items" in schema:
        text = "[" + ("a section" if "$ref" in schema["items"] else kind(schema["items"])) + ", ...]"
    else:
        named: str = schema.get("type", "anything")
        text = schema.get("format") or _KINDS.get(named, named)
    bounds = [words.format(schema[name]) for name, words in _BOUNDS.items() if name in schema]
    return " ".join([text, ", ".join(bounds)]).strip()


def is_setting(keys: tuple[str, ...]) -> bool:
    """Return whether `keys` names a setting with a value, rather than a section or a list entry."""
    entries = [schemas().get((*keys, "N"), {}), schemas().get((*keys, "NAME"), {}), schemas()[keys]]
    in_a_list = keys[-1] == "N" or keys[-1].isdigit()
    return not in_a_list and not any("properties" in schema for schema in entries)


def _known(keys: Keys) -> tuple[str, ...] | None:
    """Return the key of `schemas()` that matches `keys`, or None if there is no such setting."""
    path: tuple[str, ...] = ()
    for key in keys:
        tried = [(*path, name) for name in (str(key), "N" if isinstance(key, int) else "NAME")]
        here = next((each for each in tried if each in schemas()), None)
        if here is None:
            return None
        path = here
    return path


def _message(detail: ErrorDetails, keys: Keys, in_union: bool) -> str:
    error, value = detail["type"], detail["input"]
    if (now := renamed(keys, value)) is not None:
        return now
    if error == "extra_forbidden":
        return "no such setting" + _right_name(keys)
    if error == "value_error" and not in_union:
        return str(detail["ctx"]["error"])
    known = _known(keys)
    expected = detail["msg"] if known is None else kind(schemas()[known])
    if error == "missing" and not in_union:
        return f"missing, expected {expected}"
    got = json.dumps(value, default=str, ensure_ascii=False)
    if len(got) > _LONGEST_VALUE:
        got = got[:_LONGEST_VALUE] + "..."
    near = nearest(value, expected.split("|")) if isinstance(value, str) and "|" in expected else ""
    return f"got {got}, expected {expected}{near}"


def renamed(keys: Keys, value: Any) -> str | None:
    """Return the message for a setting or value of an earlier version, or None for any other."""
    path = ".".join("N" if isinstance(key, int) else str(key) for key in keys)
    if keys[:1] == ("runs",) and keys[2:] == ("stage",) and value == "control":
        return "is now train"
    if path.endswith(("merge.method", "opd.support", "opd.target")) and value == "product":
        return "product was removed; use merge.method weights, which did as well"
    if keys[:1] == ("runs",) and keys[2:] == ("init",) and isinstance(value, dict):
        return "must be a run's name; for a weight merge use stage: merge and set: {merge: {models: ...}}"
    return ANSWERS.get(path)


def _right_name(keys: Keys) -> str:
    *around, name = keys
    section = _known(tuple(around)) or ()
    fields = [path[-1] for path in schemas() if path and path[:-1] == section]
    if close := difflib.get_close_matches(str(name), fields, 1, 0.6):
        return f"; did you mean {dotted((*around, close[0]))}?"
    found = [path for path in schemas() if path[-1:] == (name,) and not {"N", "NAME"} & set(path)]
    if around[:1] == ["runs"]:  # a run changes settings in its `set`
        found = [(*map(str, around), "set", *path) for path in found if path[0] not in SHARED]
    elsewhere = [dotted(path) for path in found]
    return f"; did you mean {' or '.join(elsewhere)}?" if elsewhere else f"; there are {', '.join(fields)}"
