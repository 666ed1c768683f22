"""Find and read recipes, merge each recipe over the one that it `extends`, and write settings as YAML.

Values follow YAML 1.2: `1e-6` is a number, and `yes` and dates are strings. A repeated key is an error.
"""

import importlib.resources
import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from smopd.config.settings import Settings, merged
from smopd.names import nearest, redacted

Keys = tuple[str | int, ...]
"""Keys of a setting, such as `("rewards", 0, "weight")`."""

MAX_DEPTH, MAX_VALUES = 32, 10_000
"""Ours: limits that keep a few lines of YAML aliases from expanding to millions of values."""

_RESOLVERS = {  # YAML 1.2's core schema, and merge keys
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?(0|[1-9]\d*)",
    "float": r"[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
    "merge": r"<<",
}


class Mistakes(Exception):
    """Mistakes in the user's input, one line each."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


class Recipe(NamedTuple):
    """The values of a recipe, and the `file:line` of each value."""

    values: dict[str, Any]
    origin: dict[Keys, str]


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  replaces the resolvers of YAML 1.1


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes a string if YAML 1.1 or 1.2 would read it as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def text(self, data: str) -> yaml.ScalarNode:
        next_line = "\x85" in data  # only double quotes keep this character
        return self.represent_scalar("tag:yaml.org,2002:str", data, '"' if next_line else None)


_Dumper.add_representer(str, _Dumper.text)
for _name, _pattern in _RESOLVERS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(rf"(?:{_pattern})\Z"), None)


def load(name: str) -> Recipe:
    """Read a recipe, merged over those that it extends. Null removes an inherited run. Raises Mistakes."""
    return _load(_find(name, Path()), ())


def _load(path: Path, chain: tuple[Path, ...]) -> Recipe:
    if path in chain:
        circle = " -> ".join(_shown(p) for p in (*chain[chain.index(path) :], path))
        raise Mistakes([f"{_shown(path)}: extends itself: {circle}"])
    recipe = _read(path)
    parent_name = recipe.values.pop("extends", None)
    if parent_name is None:
        return recipe
    at = recipe.origin[("extends",)]
    if not isinstance(parent_name, str):
        raise Mistakes([f"{at}: extends: got {parent_name!r}, expected a recipe"])
    try:
        parent = _load(_find(parent_name, path.parent), (*chain, path))
    except Mistakes as mistakes:
        raise Mistakes([f"{at}: extends: {line}" for line in mistakes.lines]) from None
    values = merged(parent.values, recipe.values)
    if isinstance(values.get("runs"), dict):
        values["runs"] = {name: run for name, run in values["runs"].items() if run is not None}
    lists = {keys[:at] for keys in recipe.origin for at, key in enumerate(keys) if isinstance(key, int)}
    replaced = {keys for keys in parent.origin if any(keys[:at] in lists for at in range(len(keys)))}
    inherited = {keys: place for keys, place in parent.origin.items() if keys not in replaced}
    return Recipe(values, inherited | recipe.origin)


def builtin() -> dict[str, Path]:
    folder = Path(str(importlib.resources.files("smopd") / "recipes"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def _find(name: str, folder: Path) -> Path:
    """Return the file of the recipe `name`, which is a built-in name or a path relative to `folder`."""
    recipes = builtin()
    if name in recipes:
        return recipes[name]
    try:
        path = folder / Path(name).expanduser()
        if path.is_file():
            return path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # no such user, name too long, NUL byte
        raise Mistakes([f"no recipe {name[:80]!r}: {error}"]) from None
    files = [str(Path(name).parent / other.name) for other in path.parent.glob("*.yaml")]
    hint = nearest(name, [*recipes, *files]) or f"; there are {', '.join(recipes)}"
    raise Mistakes([f"no recipe {name!r}{hint}"])


def _shown(path: Path) -> str:
    if path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    return path.name if path in builtin().values() else str(path)


def _read(path: Path) -> Recipe:
    file = _shown(path)
    origin: dict[Keys, str] = {}
    twice: list[str] = []
    try:
        loader = _Loader(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        if node is not None:
            _note(node, (), file, origin, twice)
        values = {} if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f"{file}:{mark.line + 1}:{mark.column + 1}" if mark else file
        what = ", ".join(str(part) for part in (error.context, error.problem) if part)
        raise Mistakes([f"{at}: not YAML: {what}"]) from None
    except (OSError, RecursionError, yaml.YAMLError, ValueError, LookupError) as error:
        raise Mistakes([f"{file}: cannot be read: {' '.join(str(error).split())}"]) from None
    if twice:
        raise Mistakes(twice)
    if not isinstance(values, dict):
        raise Mistakes([f"{file}: got a {type(values).__name__}, expected settings as `name: value` lines"])
    return Recipe(values, origin)


def _note(node: yaml.Node, keys: Keys, file: str, origin: dict[Keys, str], twice: list[str]) -> None:
    """Add the `file:line` of every value in `node` to `origin`, and each repeated key to `twice`."""
    if len(keys) > MAX_DEPTH or len(origin) > MAX_VALUES:  # each use of an alias counts
        line = node.start_mark.line + 1
        limits = f"at most {MAX_DEPTH} levels and {MAX_VALUES:,} values, with aliases written out"
        raise Mistakes([f"{file}:{line}: the recipe is too large, expected {limits}"])
    if isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            origin[(*keys, i)] = f"{file}:{item.start_mark.line + 1}"
            _note(item, (*keys, i), file, origin, twice)
    elif isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            inner = (*keys, name)
            if name in seen:
                twice.append(f"{file}:{line}: {dotted(inner)} is given twice, first on line {seen[name]}")
            seen.setdefault(name, line)
            origin[inner] = f"{file}:{line}"
            _note(value, inner, file, origin, twice)


def dotted(keys: Keys) -> str:
    """Return the keys as a path: `("rewards", 0, "weight")` -> `rewards.0.weight`."""
    return ".".join(str(key) for key in keys)


def parse_value(text: str) -> Any:
    """Parse a command-line value as YAML if it begins with a bracket or quote, else as one plain scalar."""
    if text[:1] in tuple("[{\"'"):
        try:
            return yaml.load(text, _Loader)
        except (yaml.YAMLError, ValueError, LookupError, RecursionError):
            return text
    loader = _Loader("")
    tag = "tag:yaml.org,2002:str" if text == "<<" else loader.resolve(yaml.ScalarNode, text, (True, False))
    try:
        return loader.construct_object(yaml.ScalarNode(tag, text))
    except ValueError:  # an integer with too many digits for Python
        return text


def write_yaml(settings: Settings, *, public: bool = False) -> str:
    """Return all settings as YAML, which gives equal settings when it is read. `public` redacts secrets."""
    values = redacted(settings.model_dump()) if public else settings.model_dump()
    return yaml.dump(
        values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100, default_flow_style=None
    )
