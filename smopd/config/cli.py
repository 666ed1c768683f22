"""The command line of `python -m smopd.train`: a recipe, settings over it, and the plan of what will run.

Loads no torch: every mistake in the input is answered here, in lines to act on, before anything slow.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_origin

import tyro
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from smopd.config.errors import child, explain, kind_text, nearest, section_of
from smopd.config.recipe import Keys, Mistakes, builtin, description, dotted, load, parse_value, write_yaml
from smopd.config.schedule import BASE, Part, check_runs, output_directory, plan
from smopd.config.settings import Settings

PROGRAM = "python -m smopd.train"
DEFAULT_RECIPE = "quickstart"
COMMAND_LINE = "command line"


@dataclass(frozen=True)
class Command:
    """What the user asked for, checked."""

    settings: Settings
    recipe: str
    stage: Part
    dry_run: bool
    only: tuple[str, ...]
    """The runs to do; empty means all."""


@dataclass(frozen=True)
class _Options:
    recipe: Annotated[str, tyro.conf.Positional] = DEFAULT_RECIPE
    stage: Part = "all"
    only: tuple[str, ...] = ()
    dry_run: bool = False
    list: bool = False


_OPTIONS = ("stage", "only", "dry-run", "list")


def parse(argv: list[str]) -> Command:
    """Reads and checks a command line (without the program's name).

    Raises:
        SystemExit: 0 after --help or --list; 2 after a mistake, once stderr says all that was found.
    """
    try:
        asked = [i for i, token in enumerate(argv) if token in ("--help", "-h")]
        if asked:
            print_help(PROGRAM, *argv[asked[0] + 1 : asked[0] + 2])
            raise SystemExit(0)
        ours, given = split(argv, _OPTIONS)
        options = tyro.cli(_Options, args=ours, prog=PROGRAM, config=(tyro.conf.FlagCreatePairsOff,))
        if options.list:
            print_recipes()
            raise SystemExit(0)
        settings = read_settings(options.recipe, given)
        _check_only(settings, options)
    except Mistakes as mistakes:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            for text in mistakes.lines:
                print(f"error: {text}", file=sys.stderr)
        raise SystemExit(2) from None
    return Command(settings, options.recipe, options.stage, options.dry_run, options.only)


def read_settings(recipe: str, given: dict[str, list[str]] | None = None) -> Settings:
    """The settings of a recipe (a name or a file) with `given` (dotted path -> words) over them, all checked.

    Raises:
        Mistakes: everything that is wrong, a line each.
    """
    loaded = load(recipe)
    values, origin = loaded.values, dict(loaded.origin)
    wrong: list[str] = []
    for path, words in (given or {}).items():
        try:
            values = _override(values, path, words, origin)
        except Mistakes as mistakes:
            wrong += mistakes.lines
    try:
        given_settings = Settings.model_validate(values)
        settings = given_settings.model_copy(update={"output": str(output_directory(given_settings))})
        wrong += check_runs(settings, origin)
    except ValidationError as error:
        wrong += explain(error, origin)
    if wrong:
        raise Mistakes(wrong)
    return settings


def describe(command: Command) -> str:
    """What --dry-run prints: the resolved settings as YAML, then the plan as YAML comments."""
    settings = command.settings
    lines = [f"# plan of {command.recipe}, in {settings.output}"]
    planned = plan(settings, command.stage, command.only)
    for run in planned:
        weights = " ".join(f"{reward}={weight:g}" for reward, weight in run.weights.items())
        parts = [f"from {run.start}", f"{run.steps} steps", weights]
        if run.teachers:
            parts.append("teachers " + ", ".join(run.teachers))
        if run.done:
            parts.append("already finished")
        lines.append(f"#   {run.stage:<10}  {run.name:<16}  " + "; ".join(part for part in parts if part))
    if settings.data.evaluation is not None:
        names = settings.runs if command.stage == "evaluate" else (run.name for run in planned)
        lines.append(f"#   {'evaluate':<10}  {', '.join(dict.fromkeys([BASE, *names]))}")
    return write_yaml(settings) + "\n" + "\n".join(lines)


def split(argv: list[str], options: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """The words of a command's `options`, and the settings: dotted path -> the words up to the next option.

    Raises:
        Mistakes: an option is neither the command's nor a setting's, a line each.
    """
    ours: list[str] = []
    given: dict[str, list[str]] = {}
    wrong: list[str] = []
    words = ours
    for token in argv:
        if not token.startswith("--"):
            words.append(token)
            continue
        name, equals, value = token[2:].partition("=")
        if name.replace("_", "-") in (*options, "help"):
            words = ours
            words.append(token)
            continue
        if "." not in name and child(Settings, name)[1] is None:
            names = [f"--{option}" for option in (*options, "help", *Settings.model_fields)]
            wrong.append(f"{COMMAND_LINE}: --{name}: no such option{nearest('--' + name, names)}")
        words = given[name] = [value] if equals else []
    if wrong:
        raise Mistakes(wrong)
    return ours, given


def _check_only(settings: Settings, options: _Options) -> None:
    names = list(settings.runs)
    wrong = [
        f"{COMMAND_LINE}: --only: {name!r} is no run{nearest(name, names)}; there are {names}"
        for name in options.only
        if name not in names
    ]
    if not wrong and options.stage != "evaluate" and not plan(settings, options.stage, options.only):
        chosen = f" with --only {' '.join(options.only)}" if options.only else ""
        wrong.append(
            f"{COMMAND_LINE}: --stage {options.stage}{chosen}: {options.recipe} has nothing to do there"
        )
    if wrong:
        raise Mistakes(wrong)


def _override(values: dict[str, Any], path: str, words: list[str], origin: dict[Keys, str]) -> dict[str, Any]:
    """`values` with the words put at the dotted path; missing sections on the way are made."""
    result = dict(values)
    node: Any = result
    keys: Keys = ()
    kind: Any = Settings
    parts = path.split(".")
    for i, part in enumerate(parts):
        name, kind = child(kind, part)
        if len(keys) == 2 and keys[0] == "runs" and name == "set":
            kind = Settings
        key: str | int = name
        if isinstance(node, list):
            if not name.isdigit() or int(name) >= len(node):
                there = f"the recipe has {len(node)} entries, counted from 0"
                raise Mistakes([f"{COMMAND_LINE}: {path}: {dotted(keys)} has no entry {name!r}; {there}"])
            key = int(name)
        keys = (*keys, key)
        if i == len(parts) - 1:
            node[key] = _value(path, words, kind)
            continue
        inside = node[int(name)] if isinstance(node, list) else node.get(name)
        if inside is not None and not isinstance(inside, dict | list):
            raise Mistakes([f"{COMMAND_LINE}: {path}: {dotted(keys)} is {inside!r}, not a section"])
        node[key] = list(inside) if isinstance(inside, list) else dict(inside or {})
        node = node[key]
    for below in [known for known in origin if known[: len(keys)] == keys]:
        del origin[below]
    origin[keys] = COMMAND_LINE
    return result


def _value(path: str, words: list[str], kind: Any) -> Any:
    expected = kind_text(kind) if kind is not None else "anything"
    if not words:
        if expected == "true|false":
            return True
        raise Mistakes([f"{COMMAND_LINE}: {path}: no value, expected {expected}"])
    if len(words) > 1:
        return [parse_value(word) for word in words]
    if expected in ("text", "text|null"):
        return None if words[0] == "null" and expected == "text|null" else words[0]
    value = parse_value(words[0])
    if expected.startswith("[") and not isinstance(value, list) and value is not None and value != "batch":
        return [parse_value(part) for part in value.split(",")] if isinstance(value, str) else [value]
    return value


_OPTION_HELP = (
    ("RECIPE", "a recipe's name, or a YAML file; quickstart where none is given"),
    ("--stage PART", "all (default), warm-start, specialize, merge, train or evaluate"),
    ("--only RUN ...", "these runs of the recipe alone"),
    ("--dry-run", "print the settings and the plan, then stop"),
    ("--list", "print the recipes that there are"),
    ("--help [SECTION]", "this page, or every setting of a section; all for all of them"),
    (
        "--SETTING VALUE",
        "any setting by its dotted path: --opd.kappa 32 --rewards.1.weight 2 --output runs/mine",
    ),
)
_INTRODUCTION = (
    "Trains a language model against several rewards: first one teacher per reward, then one student from "
    "all teachers. Settings come from the recipe; the command line goes over them. Values are written as in "
    "YAML (3, 1e-6, true, null, [1, 9]). Rerun a command to resume it."
)


def print_help(program: str, section: str | None = None) -> None:
    """Prints the command's page, or the settings of one section (`all`: of every section).

    Raises:
        Mistakes: no such section.
    """
    console = Console(highlight=False)
    if section is None:
        _print_command(console, program)
        return
    names = list(Settings.model_fields)
    if section == "all":
        chosen = names
    elif section in names:
        chosen = [section]
    else:
        raise Mistakes([f"no section {section!r}{nearest(section, names)}; there are {', '.join(names)}"])
    for name in chosen:
        _print_section(console, name)


def print_recipes() -> None:
    """Prints each built-in recipe with the first line of its file, and which published row each run is."""
    console = Console(highlight=False)
    for name, path in builtin().items():
        console.print(Text(name, style="bold"))
        console.print(Padding(Text(description(path)), (0, 0, 0, 2)))
        rows = Table.grid(padding=(0, 2))
        for run, values in (load(name).values.get("runs") or {}).items():
            if isinstance(values, dict) and values.get("reproduces"):
                rows.add_row(f"    {run}", Text(str(values["reproduces"])))
        if rows.row_count:
            console.print(rows)


def _print_command(console: Console, program: str) -> None:
    usage = f"usage: {program} [RECIPE] [OPTION ...] [--SETTING VALUE ...]"
    console.print(usage, markup=False)
    console.print(f"\n{_INTRODUCTION}\n", markup=False)
    options = Table.grid(padding=(0, 3))
    for name, text in _OPTION_HELP:
        options.add_row(name, text, style=None)
    console.print(options, markup=False)
    console.print("\nsections")
    sections = Table.grid(padding=(0, 3))
    for name, field in Settings.model_fields.items():
        section = section_of(field.annotation)
        about = field.description or (section and _summary(section)) or ""
        inside = ", ".join(section.model_fields) if section else ""
        sections.add_row(f"  {name}", about if section else f"{about} ({_kind(field)})".strip())
        if inside:
            sections.add_row("", inside, style="dim")
    console.print(sections, markup=False)


def _print_section(console: Console, name: str) -> None:
    field = Settings.model_fields[name]
    section = section_of(field.annotation)
    about = (section and (field.description or _summary(section))) or ""
    console.print(f"{name}" + (f": {about}" if about else ""), markup=False, style="bold")
    settings = _settings(name, field)
    width = max(len(path) for path, _ in settings)
    for path, inner in settings:
        console.print(f"  --{path:<{width}}  {_kind(inner)}  ({_default(inner)})", markup=False)
        if inner.description:
            text = Text(" ".join(inner.description.split()), style="dim")
            console.print(Padding(text, (0, 0, 0, 8)), soft_wrap=False)
    console.print()


def _settings(path: str, field: FieldInfo) -> list[tuple[str, FieldInfo]]:
    section = section_of(field.annotation)
    if section is None:
        return [(path, field)]
    kind = get_origin(field.annotation)
    many = ".N" if kind is list else ".NAME" if kind is dict else ""
    inside = [(f"{path}{many}.{name}", inner) for name, inner in section.model_fields.items()]
    return [pair for inner_path, inner in inside for pair in _settings(inner_path, inner)]


def _kind(field: FieldInfo) -> str:
    bounds = []
    for constraint in field.metadata:
        for name, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<=")):
            if hasattr(constraint, name):
                bounds.append(f"{sign} {getattr(constraint, name):g}")
    return " ".join([kind_text(field.annotation), ", ".join(bounds)]).strip()


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    if isinstance(field.default, str):
        return field.default
    return json.dumps(field.default)


def _summary(section: type) -> str:
    return (section.__doc__ or "").split("\n")[0]
