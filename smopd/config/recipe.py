"""Recipes: where they are found, how their YAML is read, merged along `extends`, and written back.

Values follow YAML 1.2: `1e-6` is a number, `yes` and dates are strings, and a key given twice is a mistake.
"""

from __future__ import annotations

import difflib
import importlib.resources
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from smopd.config.settings import Settings, merged
from smopd.names import redacted

Keys = tuple[str | int, ...]
"""The way to a setting: `("rewards", 0, "weight")`."""

_MAX_DEPTH = 32
_MAX_VALUES = 10_000  # ours: of one file, aliases written out
_FLOAT = re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_RESOLVERS = (
    ("null", re.compile(r"~|null|Null|NULL|"), ["~", "n", "N", ""]),
    ("bool", re.compile(r"true|True|TRUE|false|False|FALSE"), list("tTfF")),
    ("int", re.compile(r"[-+]?(0|[1-9]\d*)"), list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
    ("merge", re.compile(r"<<"), ["<"]),
)


class Mistakes(Exception):
    """What is wrong with the user's input: one readable line each."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


@dataclass(frozen=True)
class Recipe:
    """The values of a recipe as given, and `file:line` of each."""

    values: dict[str, Any]
    origin: dict[Keys, str]


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  a new table, not YAML 1.1's


class _Dumper(yaml.SafeDumper):
    """Quotes what YAML 1.1 or 1.2 would take for something else than the string it is."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, _pattern, _first in _RESOLVERS:
    _full = re.compile(f"(?:{_pattern.pattern})$")
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _full, _first)
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _full, _first)


def _represent_list(dumper: yaml.SafeDumper, values: list[Any] | tuple[Any, ...]) -> yaml.Node:
    flow = not any(isinstance(value, dict | list) for value in values)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=flow)


_Dumper.add_representer(list, _represent_list)
_Dumper.add_representer(tuple, _represent_list)


def load(name: str) -> Recipe:
    """Reads the recipe `name` (a built-in name or a YAML file) with all that it extends merged under it.

    A recipe leaves a run of the one that it extends out by giving it as null.

    Raises:
        Mistakes: no such recipe, a circle of `extends`, malformed YAML or a key given twice.
    """
    return _load(find(name, Path()), ())


def _load(path: Path, chain: tuple[Path, ...]) -> Recipe:
    if path in chain:
        circle = " -> ".join(shown(p) for p in (*chain[chain.index(path) :], path))
        raise Mistakes([f"{shown(path)}: extends itself: {circle}"])
    recipe = read(path)
    parent_name = recipe.values.pop("extends", None)
    if parent_name is None:
        return recipe
    if not isinstance(parent_name, str):
        raise Mistakes([f"{recipe.origin[('extends',)]}: extends: got {parent_name!r}, expected a recipe"])
    try:
        parent = _load(find(parent_name, path.parent), (*chain, path))
    except Mistakes as mistakes:
        at = recipe.origin[("extends",)]
        raise Mistakes([f"{at}: extends: {line}" for line in mistakes.lines]) from None
    values = merged(parent.values, recipe.values)
    if isinstance(values.get("runs"), dict):
        values["runs"] = {name: run for name, run in values["runs"].items() if run is not None}
    return Recipe(values, parent.origin | recipe.origin)


def builtin() -> dict[str, Path]:
    """The recipes that come with the package, by name."""
    folder = Path(str(importlib.resources.files("smopd") / "recipes"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find(name: str, folder: Path) -> Path:
    """The file of a recipe: a built-in name, or a path relative to `folder`."""
    recipes = builtin()
    if name in recipes:
        return recipes[name]
    try:
        path = folder / Path(name).expanduser()
        if path.is_file():
            return path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # no such user, too long, a NUL
        raise Mistakes([f"no recipe {name[:80]!r}: {error}"]) from None
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        kind, there = (
            "recipe file",
            {other.stem: str(Path(name).with_name(other.name)) for other in _siblings(path)},
        )
    else:
        kind, there = "recipe", {other: other for other in recipes}
    close = [there[stem] for stem in difflib.get_close_matches(path.stem, there, 3, 0.6)]
    hint = f"; did you mean {' or '.join(close)}?" if close else f"; there are {', '.join(recipes) or 'none'}"
    raise Mistakes([f"no {kind} {name!r}{hint}"])


def _siblings(path: Path) -> list[Path]:
    return sorted(path.parent.glob("*.y*ml")) if path.parent.is_dir() else []


def description(path: Path) -> str:
    """The first comment line of a recipe."""
    with path.open(encoding="utf-8") as file:
        first = file.readline().strip()
    return first.lstrip("# ") if first.startswith("#") else ""


def shown(path: Path) -> str:
    """A path as short as it can be said: relative to the current folder where it is inside."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return path.name if path in builtin().values() else str(path)


def read(path: Path) -> Recipe:
    """Reads one YAML file; `extends` is left in the values.

    Raises:
        Mistakes: unreadable, malformed, a key given twice, or no mapping.
    """
    file = shown(path)
    try:
        text = path.read_text(encoding="utf-8")
        loader = _Loader(text)
        node = loader.get_single_node()
        origin: dict[Keys, str] = {}
        twice: list[str] = []
        if node is not None:
            _walk(node, (), file, origin, twice, [0])
        if twice:
            raise Mistakes(twice)
        values = {} if node is None else loader.construct_document(node)
    except (OSError, UnicodeDecodeError) as error:
        raise Mistakes([f"{file}: cannot be read: {error}"]) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f"{file}:{mark.line + 1}:{mark.column + 1}" if mark else file
        what = ", ".join(str(part) for part in (error.context, error.problem) if part)
        raise Mistakes([f"{at}: not YAML: {what}"]) from None
    except RecursionError:
        raise Mistakes([f"{file}: nested deeper than {_MAX_DEPTH} levels"]) from None
    except (yaml.YAMLError, ValueError, LookupError) as error:  # the last of a tag's own constructor
        raise Mistakes([f"{file}: not YAML: {' '.join(str(error).split())}"]) from None
    if not isinstance(values, dict):
        raise Mistakes([f"{file}: got a {type(values).__name__}, expected settings, `name: value` a line"])
    return Recipe(values, origin)


def _walk(
    node: yaml.Node, keys: Keys, file: str, origin: dict[Keys, str], twice: list[str], visited: list[int]
) -> None:
    if len(keys) > _MAX_DEPTH:
        raise Mistakes([f"{file}:{node.start_mark.line + 1}: nested deeper than {_MAX_DEPTH} levels"])
    visited[0] += 1  # an alias is walked wherever it stands: a few lines of them can be billions of values
    if visited[0] > _MAX_VALUES:
        raise Mistakes([f"{file}: has more than {_MAX_VALUES} values, those of its aliases counted"])
    if isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            origin[(*keys, i)] = f"{file}:{item.start_mark.line + 1}"
            _walk(item, (*keys, i), file, origin, twice, visited)
    elif isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                _walk(value, (*keys, "<<"), file, origin, twice, visited)
                continue
            line = key.start_mark.line + 1
            if key.value in seen:
                path = dotted((*keys, key.value))
                twice.append(f"{file}:{line}: {path} is given twice, first in line {seen[key.value]}")
            seen.setdefault(key.value, line)
            origin[(*keys, key.value)] = f"{file}:{line}"
            _walk(value, (*keys, key.value), file, origin, twice, visited)


def dotted(keys: Keys) -> str:
    """`("rewards", 0, "weight")` -> `rewards.0.weight`."""
    return ".".join(str(key) for key in keys)


def parse_value(text: str) -> Any:
    """One value from the command line, as in YAML: a number, true, null, a string, or `[...]` and `{...}`.

    Anything that does not begin with a bracket or a quote is taken whole, so no character in it is special.
    """
    if text[:1] in tuple("[{\"'"):
        try:
            return yaml.load(text, _Loader)
        except (yaml.YAMLError, ValueError, LookupError, RecursionError):
            return text
    loader = _Loader("")
    tag = "tag:yaml.org,2002:str" if text == "<<" else loader.resolve(yaml.ScalarNode, text, (True, False))
    try:
        return loader.construct_object(yaml.ScalarNode(tag, text))
    except ValueError:  # an integer of more digits than Python reads
        return text


def write_yaml(settings: Settings, *, public: bool = False) -> str:
    """All settings as YAML; read back and validated they are equal to `settings`.

    public: without secrets.
    """
    values = settings.model_dump()
    values = redacted(values) if public else values
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
