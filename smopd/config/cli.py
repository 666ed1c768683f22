"""The command line of `smopd train`. Mistakes in the settings are reported before torch is imported."""

import json
import os
import sys
from dataclasses import dataclass, fields
from typing import Annotated, Any, TypeVar

import tyro
from pydantic import ValidationError
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from smopd.config.errors import explain, is_setting, kind, schemas
from smopd.config.recipe import Keys, Mistakes, builtin, dotted, load, parse_value, write_yaml
from smopd.config.rules import check
from smopd.config.schedule import BASE, Part, done_steps, plan
from smopd.config.settings import Settings
from smopd.engine.files import DamagedFile
from smopd.names import nearest

COMMAND_LINE = "command line"
PARENT = "SMOPD_LAUNCHED_BY"
"""Environment variable with the process id of the launcher, which sets it for its ranks."""
O = TypeVar("O", bound="Selection")
_INTRODUCTION = (
    "Train a language model on several rewards: one teacher per reward, then a student of all. "
    "Settings come from the recipe. Override any of them by its dotted path, with values as in YAML: "
    "--opd.kappa 32 --rewards.1.weight 2 --student.betas 0.9 0.95 --loss.dual_clip null. "
    "Rerun a command to resume it.\n\n"
    "--help SECTION prints the settings of a section, --help all prints all:\n"
)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """A recipe and a selection of its runs."""

    recipe: Annotated[str, tyro.conf.Positional] = "quickstart"
    """Name of a built-in recipe, or a YAML file."""
    only: tuple[str, ...] = ()
    """Select only these runs of the recipe."""


@dataclass(frozen=True, kw_only=True)
class Options(Selection):
    stage: Part = "all"
    """Part of the recipe to run."""
    change: bool = False
    """Resume runs with changed settings or inputs. Each change is recorded in the run folder."""
    dry_run: bool = False
    """Print the plan. If the model is on this machine, also try every reward. Exit with 1 if one fails."""
    show_settings: bool = False
    """With --dry-run: print all settings as YAML instead of calling the rewards."""
    list: bool = False
    """Print the built-in recipes."""


@dataclass(frozen=True, kw_only=True)
class Command(Options):
    settings: Settings
    arguments: tuple[str, ...]
    """The command line as given."""


def parse(argv: list[str]) -> Command:
    """Parse and validate a command line without the program name. Raise SystemExit after help or mistakes."""
    try:
        asked = [i for i, token in enumerate(argv) if token in ("--help", "-h")]
        if asked and (section := argv[asked[0] + 1 : asked[0] + 2]):
            print_section(*section)
            raise SystemExit(0)
        about = [(name, schemas()[name,]["description"].splitlines()[0]) for name in Settings.model_fields]
        introduction = _INTRODUCTION + "\n".join(f"  {name}: {text}" for name, text in about)
        options, given = read_options(Options, argv, "python -m smopd.train", introduction)
        if options.list:
            print_recipes()
            raise SystemExit(0)
        settings = read_settings(options.recipe, given, options.only)
        if options.stage != "evaluate" and not plan(settings, options.stage, options.only):
            chosen = f" with --only {' '.join(options.only)}" if options.only else ""
            nothing = f"{options.recipe} has no such run"
            raise Mistakes([f"{COMMAND_LINE}: --stage {options.stage}{chosen}: {nothing}"])
    except (Mistakes, OSError, DamagedFile) as error:  # unreadable files of earlier runs raise the last two
        if os.environ.get("LOCAL_RANK", "0") == "0":
            for text in getattr(error, "lines", [str(error)]):
                print(f"error: {text}", file=sys.stderr)
        raise SystemExit(2) from None
    if os.environ.get("LOCAL_RANK", "0") == "0" and PARENT not in os.environ:
        for path in given:
            if own := [
                name for name in options.only or settings.runs if _sets(settings.runs[name].set, path)
            ]:
                text = f"their own {path} applies; change it by --runs.NAME.set.{path}"
                print(f"note: runs {', '.join(own)}: {text}", file=sys.stderr)
    return Command(settings=settings, arguments=tuple(argv), **vars(options))


def _sets(own: Any, path: str) -> bool:
    """Return whether a run's `set` has the dotted path, or a value above it."""
    for key in path.split("."):
        if not isinstance(own, dict) or key not in own:
            return not isinstance(own, dict)
        own = own[key]
    return True


def read_options(
    options: type[O], argv: list[str], program: str, about: str | None = None
) -> tuple[O, dict[str, list[str]]]:
    """Split `argv` into `options` and settings (dotted path -> words). Raise Mistakes for unknown options."""
    own = [*(field.name.replace("_", "-") for field in fields(options)), "help"]
    ours: list[str] = []
    given: dict[str, list[str]] = {}
    wrong: list[str] = []
    words = ours
    for token in argv:
        name, equals, value = token[2:].partition("=")
        if token == "-h":
            ours.append(token)
        elif not token.startswith("--"):
            words.append(token)
        elif name.replace("_", "-") in own:
            words = ours
            words.append(token)
        else:
            if "." not in name and name not in Settings.model_fields:
                names = [f"--{option}" for option in (*own, *Settings.model_fields)]
                wrong.append(f"{COMMAND_LINE}: --{name}: no such option{nearest('--' + name, names)}")
            words = given[name] = [value] if equals else []
    if wrong:
        raise Mistakes(wrong)
    no_pairs = (tyro.conf.FlagCreatePairsOff,)
    return tyro.cli(options, args=ours, prog=program, description=about, config=no_pairs), given


def read_settings(
    recipe: str, given: dict[str, list[str]] | None = None, only: tuple[str, ...] = ()
) -> Settings:
    """Read a recipe, overridden by `given` (dotted path -> words). Raise Mistakes if it is invalid."""
    loaded = load(recipe)
    values, origin = loaded.values, dict(loaded.origin)
    wrong: list[str] = []
    for path, words in (given or {}).items():
        try:
            values = _override(values, path, words, origin)
        except Mistakes as mistakes:
            wrong += mistakes.lines
    try:
        settings = Settings.model_validate(values)
    except ValidationError as error:
        raise Mistakes(wrong + explain(error, origin)) from None
    names = list(settings.runs)
    wrong += check(settings, origin)
    for name in (each for each in only if each not in names):
        wrong += [f"{COMMAND_LINE}: --only: {name!r} is not a run{nearest(name, names)}; there are {names}"]
    if wrong:
        raise Mistakes(wrong)
    return settings


def describe(command: Command) -> str:
    """Return the plan. With `show_settings`, return the settings as YAML, then the plan as comments."""
    settings = command.settings
    lines = [f"plan of {command.recipe}, in {settings.output}"]
    planned = plan(settings, command.stage, command.only)
    for run in planned:
        weights = " ".join(f"{reward}={weight:g}" for reward, weight in run.weights.items())
        parts = [f"from {run.start}", f"{run.steps} steps", weights]
        if run.teachers:
            parts.append("teachers " + ", ".join(run.teachers))
        if run.done:
            parts.append("finished")
        elif done := done_steps(settings, run.name):
            parts.append(f"continues after step {done}")
        lines.append(f"  {run.stage:<10}  {run.name:<16}  " + "; ".join(part for part in parts if part))
    if settings.data.evaluation is not None:
        names = [run.name for run in planned]
        if command.stage == "evaluate":
            names = [*(command.only or settings.runs)]
        lines.append(f"  {'evaluate':<10}  {', '.join(dict.fromkeys([BASE, *names]))}")
    if command.show_settings:
        lines = [write_yaml(settings), *(f"# {line}" for line in lines)]
    return "\n".join(lines)


def _override(values: dict[str, Any], path: str, words: list[str], origin: dict[Keys, str]) -> dict[str, Any]:
    """Return a copy of `values` with `words` at the dotted path. Missing sections are created."""
    if not words:
        raise Mistakes([f"{COMMAND_LINE}: {path}: no value"])
    parsed = [parse_value(word) for word in words]
    result = {"": values}
    node: Any = result
    key: Any = ""
    keys: Keys = ()
    for part in path.split("."):
        inside = node[key] if isinstance(node, list) else node.get(key)
        if inside is None:
            origin[keys] = COMMAND_LINE
        elif not isinstance(inside, dict | list):
            raise Mistakes([f"{COMMAND_LINE}: {path}: {dotted(keys)} is {inside!r}, not a section"])
        # Copy the section, because another section may be the same object through a YAML alias.
        node[key] = list(inside) if isinstance(inside, list) else dict(inside or {})
        node = node[key]
        if isinstance(node, list) and not (part.isdecimal() and int(part) < len(node)):
            there = f"there are {len(node)}, counted from 0"
            raise Mistakes([f"{COMMAND_LINE}: {path}: {dotted(keys)} has no entry {part!r}; {there}"])
        key = int(part) if isinstance(node, list) else part
        keys = (*keys, key)
    node[key] = parsed if len(parsed) > 1 else parsed[0]
    for below in [known for known in origin if known[: len(keys)] == keys]:
        del origin[below]
    origin[keys] = COMMAND_LINE
    return result[""]


def print_section(section: str) -> None:
    """Print the type, default and description of every setting in a section, or in all sections for `all`."""
    names = list(Settings.model_fields)
    if section not in ("all", *names):
        raise Mistakes([f"no section {section!r}{nearest(section, names)}; there are {', '.join(names)}"])
    console = Console(highlight=False)
    for keys, schema in schemas().items():
        if keys and section in ("all", keys[0]) and is_setting(keys):
            default = json.dumps(schema["default"]) if "default" in schema else "required"
            console.print(f"--{dotted(keys)}  {kind(schema)}  ({default})", markup=False)
            text = Text(" ".join(schema.get("description", "").split()), style="dim")
            if text:
                console.print(Padding(text, (0, 0, 0, 6)))


def print_recipes() -> None:
    """Print each built-in recipe with its first comment and the published rows that its runs reproduce."""
    console = Console(highlight=False)
    for name, path in builtin().items():
        console.print(Text(name, style="bold"))
        first, _, _ = path.read_text(encoding="utf-8").partition("\n")
        console.print(Padding(Text(first.lstrip("# ")), (0, 0, 0, 2)))
        rows = Table.grid(padding=(0, 2))
        for run, values in load(name).values["runs"].items():
            if row := values.get("reproduces"):
                rows.add_row(f"    {run}", Text(row))
        if rows.row_count:
            console.print(rows)
