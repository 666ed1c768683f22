"""Results of a recipe: a table on the screen, `results.json` and `report.html`."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from rich.console import Console

from smopd.config.recipe import write_yaml
from smopd.config.schedule import BASE
from smopd.config.settings import Settings
from smopd.engine.files import write_atomically
from smopd.record.files import JsonlLog
from smopd.record.progress import console, say
from smopd.report.page import Report, write_report
from smopd.report.tables import Row, table

log = logging.getLogger(__name__)
WIDTH = 132  # of the table, if the output is no terminal


def summarise(settings: Settings, folder: Path) -> None:
    """Print and write the results of all evaluated runs."""
    rows, columns = evaluated_rows(settings, folder), table_columns(settings)
    if rows:
        shown = console() if console().is_terminal else Console(width=WIDTH, file=console().file)
        shown.print(table(rows, columns))
    results = {row.run: row.values for row in rows}
    write_atomically(folder / "results.json", json.dumps(results, indent=1).encode())

    def lines(file: str) -> dict[str, list[dict[str, Any]]]:
        found = {name: JsonlLog(folder / name / file).read() for name in settings.runs}
        return {name: read for name, read in found.items() if read}

    merges = {name: folder / name / "merge.json" for name in settings.runs}
    labels = _labels(settings)
    report = Report(
        title=settings.name,
        caption=settings.description,
        rows=rows,
        columns=columns,
        settings_yaml=write_yaml(settings, public=True),
        metrics=lines("metrics.jsonl"),
        samples=lines("samples.jsonl"),
        tokens=lines("tokens.jsonl"),
        changes=lines("changes.jsonl"),
        merges={name: json.loads(path.read_text()) for name, path in merges.items() if path.exists()},
        teachers=[labels.get(teacher.model, teacher.model) for teacher in settings.teachers.models],
    )
    try:
        write_report(folder / "report.html", report)
    except Exception:  # the results are already written
        log.exception("report.html could not be written")
    else:
        say(f"report: {folder / 'report.html'}")


def _labels(settings: Settings) -> dict[str, str]:
    return {BASE: "Base"} | {name: run.label or name for name, run in settings.runs.items()}


def evaluated_rows(settings: Settings, folder: Path) -> list[Row]:
    rows = []
    for name, label in _labels(settings).items():
        path = folder / name / "evaluation.json"
        if path.exists():
            values = json.loads(path.read_text())
            rows.append(Row(label, name, {key: value for key, value in values.items() if value is not None}))
    return rows


def table_columns(settings: Settings) -> list[str]:
    """Return the columns: each reward and their sum, greedy and sampled."""
    names = [*(reward.name for reward in settings.rewards), "sum"]
    kinds = ["greedy", *(["sampled"] if settings.evaluation.samples else [])]
    return [f"{kind}/{name}" for kind in kinds for name in names]
