"""Results of a recipe: a table on the screen, `results.json`, `report.html` and the cards of its models."""

import json
import logging
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from rich.console import Console

from smopd.config.recipe import write_yaml
from smopd.config.schedule import BASE, count_steps, plan
from smopd.config.settings import Settings
from smopd.engine.files import read_json, write_atomically
from smopd.names import without_controls, without_secrets
from smopd.record.files import JsonlLog
from smopd.record.progress import console, say
from smopd.report.page import Report, write_report
from smopd.report.tables import Row, cell, heading, table

log = logging.getLogger(__name__)
WIDTH = 132  # of the table, if the output is not a terminal
CARD = "README.md"
COSTS = ("steps", "total steps", "training time")


def summarise(settings: Settings, folder: Path) -> None:
    """Print and write the results of all evaluated runs."""
    rows, columns = evaluated_rows(settings, folder), table_columns(settings)
    if rows:
        shown = console() if console().is_terminal else Console(width=WIDTH, file=console().file)
        shown.print(table(rows, columns))
    results = {row.run: row.values for row in rows}
    write_atomically(folder / "results.json", json.dumps(results, indent=1).encode())
    try:
        write_report(folder / "report.html", report_of(settings, folder, rows, columns))
    except Exception as error:  # the results are already written
        log.warning("report.html could not be written (%s: %s)", type(error).__name__, error)
    else:
        say(f"report: {folder / 'report.html'}")


def report_of(settings: Settings, folder: Path, rows: Sequence[Row], columns: Sequence[str]) -> Report:
    """Return the report's content, read from the files of a run directory."""

    def lines(file: str) -> dict[str, list[dict[str, Any]]]:
        found = {name: JsonlLog(folder / name / file).read() for name in settings.runs}
        return {name: read for name, read in found.items() if read}

    metrics = lines("metrics.jsonl")
    seconds = {run: training_seconds(read) for run, read in metrics.items()}
    runs = {run.name: run for run in plan(settings)}
    needs = {name: {*run.starts, *run.teachers} for name, run in runs.items()}
    steps = count_steps({name: runs[name].steps for name in settings.runs}, needs)
    spent = {run: (at.own, at.total, duration(seconds.get(run, 0.0))) for run, at in steps.items()}
    costs = {run: dict(zip(COSTS, each, strict=True)) for run, each in spent.items()}
    merges = {name: folder / name / "merge.json" for name in settings.runs}
    return Report(
        title=settings.name,
        caption=settings.description,
        facts={"Advantage estimator": estimators(settings), **facts(settings, folder, sum(seconds.values()))},
        rows=[row._replace(values=costs.get(row.run, {}) | row.values) for row in rows],
        held_out=held_out(settings, folder, rows),
        columns=[*COSTS, *columns],
        rewards=[reward.name for reward in settings.rewards],
        settings_yaml=write_yaml(settings, public=True),
        kinds={name: kind(settings, name) for name in settings.runs},
        begins={run: at.wall_clock - at.own for run, at in steps.items()},
        metrics=metrics,
        samples=lines("samples.jsonl"),
        tokens=lines("tokens.jsonl"),
        changes=lines("changes.jsonl"),
        merges={name: read_json(path, rows=list) for name, path in merges.items() if path.exists()},
        teachers=[teacher.model for teacher in settings.teachers.models],
    )


def kind(settings: Settings, run: str) -> str:
    """Return a run's stage, or a merge's method. `train` from the base is followed by its estimator."""
    stage, own = settings.runs[run].stage, settings.resolved(run)
    if stage == "train" and settings.runs[run].init == BASE:
        return f"train {own.advantage.estimator}"
    return own.merge.method if stage == "merge" else stage


def held_out(settings: Settings, folder: Path, rows: Sequence[Row]) -> str:
    """Return the numbers of prompts and responses that the rows average. All runs have the same prompts."""
    files = [file for row in rows if (file := folder / row.run / "responses.jsonl").exists()]
    lines = files[0].read_bytes().splitlines() if files else []
    try:
        prompts = len({json.loads(line)["prompt"] for line in lines})
    except (ValueError, KeyError):  # a truncated line
        prompts = 0
    if prompts == 0:
        return "held-out prompts"
    sampled = f" and {settings.evaluation.samples} sampled" * bool(settings.evaluation.samples)
    return f"{prompts} held-out prompt{'s' * (prompts != 1)}, 1 greedy response{sampled} each"


def estimators(settings: Settings) -> str:
    """Return the advantage estimator of most runs, then the others with the labels of their runs."""
    labels: dict[str, list[str]] = {}
    for name, run in settings.runs.items():
        labels.setdefault(settings.resolved(name).advantage.estimator, []).append(f'"{run.label or name}"')
    usual = max(labels, key=lambda estimator: len(labels[estimator]))
    others = [f"{name} in {', '.join(runs)}" for name, runs in labels.items() if name != usual]
    return usual + ", but " * bool(others) + "; ".join(others)


def training_seconds(lines: Sequence[Mapping[str, Any]]) -> float:
    return sum(v or 0.0 for line in lines for name, v in line.items() if name.startswith("seconds/"))


def duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def facts(settings: Settings, folder: Path, seconds: float) -> dict[str, str]:
    """Return seed, training time, and (from commands.jsonl) when, where and how the newest command ran."""
    file = folder / "commands.jsonl"
    found = {"Seed": str(settings.seed), "Training time": duration(seconds)}
    lines = file.read_bytes().splitlines() if file.exists() else []
    if not lines:
        return found
    newest = json.loads(lines[-1])
    there = newest["environment"]
    packages = [f"{name} {version}" for name, version in there["packages"].items() if version]
    processes = f"{there['world_size']} process" + "es" * (there["world_size"] != 1)
    where = there["accelerator"] or f"{there['cpus']} CPUs"
    return {
        "Date": f"{datetime.fromtimestamp(newest['time'], timezone.utc):%Y-%m-%d %H:%M} UTC",
        **found,
        "Commit": there["git"] or "not a checkout",
        "Machine": f"{where}, {processes}, {there['machine']}",
        "Versions": ", ".join([f"smopd {there['smopd']}", f"Python {there['python']}", *packages]),
        "Command": newest.get("command", "not recorded"),
    }


def evaluated_rows(settings: Settings, folder: Path) -> list[Row]:
    labels = {BASE: "Base"} | {name: run.label or name for name, run in settings.runs.items()}
    rows = []
    for name, label in labels.items():
        path = folder / name / "evaluation.json"
        if path.exists():
            values = read_json(path)
            rows.append(Row(label, name, {key: value for key, value in values.items() if value is not None}))
    return rows


def table_columns(settings: Settings) -> list[str]:
    """Return the columns: each reward and their sum, greedy and sampled."""
    names = [*(reward.name for reward in settings.rewards), "sum"]
    kinds = ["greedy", *(["sampled"] if settings.evaluation.samples else [])]
    return [f"{kind}/{name}" for kind in kinds for name in names]


def write_card(settings: Settings, folder: Path, name: str, export: Path, step: int | None = None) -> None:
    """Write the model card of the run `name` to the folder `export`. `step` is the step of the export."""
    own = settings.resolved(name)
    path, file = settings.model.path, folder / name / "done.json"
    done = read_json(file, steps=int)["steps"] if file.exists() else None
    pages = Environment(loader=FileSystemLoader(Path(__file__).parent), trim_blocks=True)
    pages.filters |= {"heading": heading, "public": without_secrets}
    text = pages.get_template("card.md").render(
        base=path if path is not None and not Path(path).expanduser().exists() else None,
        title=own.runs[name].label or name,
        settings=settings,
        run=next(run for run in plan(settings) if run.name == name),
        step=step or done,
        rewards=own.rewards,
        rows=[row for row in evaluated_rows(settings, folder) if step in (None, done) or row.run != name],
        columns=table_columns(settings),
        facts=facts(settings, folder, training_seconds(JsonlLog(folder / name / "metrics.jsonl").read())),
        yaml=write_yaml(own, public=True),
        cell=cell,
    )
    write_atomically(export / CARD, without_controls(text).encode("utf-8", "replace"))
