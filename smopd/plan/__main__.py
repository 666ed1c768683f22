"""`python -m smopd.plan RECIPE --gpus 8 --gpu-memory 80`: what a run needs on each GPU, before there is one.

Reads configs alone and loads no weights. Takes a recipe and any setting over it, as `smopd.train` does.
Exit status 0: every run fits; 1: one does not, with the settings that would make it fit; 2: a mistake.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

from smopd import extra  # noqa: F401 says what to install

# isort: split
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from smopd.config.cli import COMMAND_LINE, DEFAULT_RECIPE, read_settings, split
from smopd.config.errors import nearest
from smopd.config.recipe import Mistakes
from smopd.config.schedule import ordered
from smopd.config.settings import Settings

if TYPE_CHECKING:
    from smopd.plan.advice import Change
    from smopd.plan.budget import Budget
    from smopd.plan.models import Models

PROGRAM = "python -m smopd.plan"
MIB, GIB = 1 << 20, 1 << 30
WIDTH = 132  # of the table where the output is no terminal


@dataclass(frozen=True)
class Options:
    """Any setting of the recipe goes over it by its dotted path, as for `python -m smopd.train`."""

    recipe: Annotated[str, tyro.conf.Positional] = DEFAULT_RECIPE
    """A recipe's name, or a YAML file."""
    gpus: int = 8
    """GPUs, one rank each."""
    gpu_memory: float = 80.0
    """GiB of each."""
    gpus_per_node: int = 8
    reserve: float = 3.0
    """GiB of each GPU for CUDA's context, NCCL and fragments; an assumption."""
    inside: float = 200.0
    """GB/s that a GPU receives from its own node; an assumption."""
    between: float = 40.0
    """GB/s that a GPU receives from other nodes; an assumption."""
    run: str | None = None
    """Show this run of the recipe; else the one that needs most."""
    only: tuple[str, ...] = ()
    """Plan these runs alone, as `python -m smopd.train --only` does them."""
    json: bool = False


@dataclass(frozen=True)
class Plan:
    """One run's budget, and what would make it fit where it does not."""

    run: str
    budget: Budget
    advice: list[tuple[Change, ...]]


def main(argv: list[str] | None = None) -> int:
    try:
        options, settings = parse(sys.argv[1:] if argv is None else argv)
        plans = plan(options, settings)
    except Mistakes as mistakes:
        for line in mistakes.lines:
            print(f"error: {line}", file=sys.stderr)
        return 2
    shown = next((p for p in plans if p.run == options.run), None)
    if options.json:
        print(json.dumps(as_json(plans, options), indent=1))
    else:
        show(plans, shown or max(plans, key=_demand), options)
    return 0 if all(p.budget.fits for p in plans) else 1


def parse(argv: list[str]) -> tuple[Options, Settings]:
    """Our options, and the recipe with the other options over it.

    Raises:
        Mistakes: everything that is wrong, a line each.
        SystemExit: after --help, or a mistake in our own options.
    """
    names = [option.name.replace("_", "-") for option in fields(Options)]
    ours, given = split(argv, names)
    options = tyro.cli(Options, args=ours, prog=PROGRAM, config=(tyro.conf.FlagCreatePairsOff,))
    wrong = []
    for option in ("gpus", "gpu_memory", "gpus_per_node", "inside", "between"):
        if getattr(options, option) <= 0:
            name = option.replace("_", "-")
            wrong.append(f"{COMMAND_LINE}: --{name}: got {getattr(options, option):g}, expected more than 0")
    settings = read_settings(options.recipe, given)
    there = list(settings.runs)
    asked = {"run": () if options.run is None else (options.run,), "only": options.only}
    for option, chosen in asked.items():
        for name in chosen:
            if name not in there:
                hint = nearest(name, there)
                wrong.append(f"{COMMAND_LINE}: --{option}: {name!r} is no run{hint}; there are {there}")
    if wrong:
        raise Mistakes(wrong)
    return options, settings


def plan(options: Options, settings: Settings) -> list[Plan]:
    """The plan of every run of the recipe.

    Raises:
        Mistakes: a model's config cannot be read, or settings do not go with it.
    """
    from smopd.plan.advice import advise
    from smopd.plan.budget import budget
    from smopd.plan.machine import Machine
    from smopd.plan.models import ModelReader
    from smopd.run.failures import UnusableInput

    machine = Machine(
        gpus=options.gpus,
        memory=int(options.gpu_memory * GIB),
        per_node=options.gpus_per_node,
        reserve=int(options.reserve * GIB),
        inside=options.inside * 1e9,
        between=options.between * 1e9,
    )
    plans, reader = [], ModelReader(settings)
    earlier: list[tuple[Settings, Models]] = []
    for name in ordered(settings):
        if options.only and name not in options.only:
            continue
        own = settings.resolved(name)
        try:
            models = reader.of(own, name)
            found = budget(own, models, machine, earlier)
        except (UnusableInput, ValueError) as error:
            raise Mistakes([f"runs.{name}: {next(iter(str(error).splitlines()))}"]) from error
        plans.append(Plan(name, found, [] if found.fits else advise(own, models, machine, earlier)))
        earlier.append((own, models))
    return plans


def _demand(plan: Plan) -> int:
    return max(plan.budget.totals.values())


def show(plans: list[Plan], shown: Plan, options: Options) -> None:
    """Prints the table of one run, a line for each other one, and what would help."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(width=WIDTH, highlight=False, color_system=None)
    print_table(shown, console)
    found = shown.budget
    console.print(
        f"usable: {_text(found.usable, GIB)} GiB a GPU, {options.reserve:g} kept back", markup=False
    )
    for note in found.notes:
        console.print(note, markup=False)
    sync = found.sync
    console.print(
        f"weight sync: {_text(sync.bytes, GIB)} GiB into each GPU, {sync.note}; about {sync.seconds:.2g} s "
        f"at {sync.bandwidth / 1e9:g} GB/s (assumed)",
        markup=False,
    )
    for one in plans:
        totals = one.budget.totals
        widest = max(totals, key=lambda column: totals[column])
        verdict = (
            "fits"
            if one.budget.fits
            else f"does not fit, by {_text(totals[widest] - one.budget.usable, GIB)}"
        )
        console.print(
            f"run {one.run}: {_text(totals[widest], GIB)} GiB at most, in {widest}: {verdict}", markup=False
        )
    if not shown.budget.fits:
        for changes in shown.advice:
            line = " ".join(f"{_option(change)} {_value(change.value)}" for change in changes)
            console.print(f"would fit with: {line}", markup=False)
        if not shown.advice:
            console.print("no setting that this planner knows makes it fit", markup=False)


def print_table(shown: Plan, console: Console) -> None:
    totals = shown.budget.totals
    unit, name = (GIB, "GiB") if max(totals.values()) >= GIB else (MIB, "MiB")
    table = Table(box=box.SIMPLE if console.is_terminal else None, pad_edge=False)
    table.add_column(f"{shown.run}: {name} a GPU")
    for column in totals:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for need in shown.budget.needs:
        cells = [_text(need.bytes.get(column, 0), unit) for column in totals]
        table.add_row(need.what, *cells, need.note)
    table.add_row("total", *(_text(total, unit) for total in totals.values()), style="bold")
    table.add_row(
        "left", *(f"{(shown.budget.usable - total) / unit:.2f}" for total in totals.values()), style="dim"
    )
    console.print(table)


def as_json(plans: list[Plan], options: Options) -> dict[str, Any]:
    """All runs, in bytes."""
    runs = {}
    for one in plans:
        found = one.budget
        runs[one.run] = {
            "fits": found.fits,
            "usable": found.usable,
            "totals": found.totals,
            "needs": [asdict(need) for need in found.needs],
            "sync": {**asdict(found.sync), "seconds": found.sync.seconds},
            "notes": list(found.notes),
            "advice": [{change.setting: change.value for change in changes} for changes in one.advice],
        }
    return {"options": asdict(options), "fits": all(one.budget.fits for one in plans), "runs": runs}


def _text(n_bytes: int, unit: int) -> str:
    return "" if n_bytes == 0 else f"{n_bytes / unit:.2f}"


def _option(change: Change) -> str:
    return change.setting if change.setting.startswith("--") else f"--{change.setting}"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        inside = ", ".join(f"{name}: {_value(one)}" for name, one in value.items())
        return f"'{{{inside}}}'"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    sys.exit(main())
