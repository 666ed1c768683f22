"""What an evaluation leaves: SUITE_items.jsonl, SUITE.json and a table in the paper's columns."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from smopd.engine.files import write_atomically
from smopd.evals.bootstrap import COVERAGE, DRAWS, SEED
from smopd.evals.options import Response
from smopd.evals.suite import Column, Scores, Suite

Interval = tuple[float, float]
ROW = (
    "key",
    "group",
    "response",
    "finished",
    "truth",
    "prompt_cut",
)  # of a written item; the rest are scores


@dataclass(frozen=True)
class Result:
    """A scored run.

    Attributes:
        label: its row's name.
        summary: of the suite.
        intervals: of the columns, 95%.
        source: where responses came from and how, as JSON.
        title: of the table; says where the items are a part of the suite's.
        truncated: responses that did not end by themselves; None where that is not known.
    """

    label: str
    summary: Mapping[str, float | None]
    intervals: Mapping[str, Interval]
    source: Mapping[str, Any]
    n: int
    title: str
    truncated: int | None


def items_path(output: Path, suite: Suite) -> Path:
    return output / f"{suite.name}_items.jsonl"


def write_items(
    output: Path, suite: Suite, responses: Sequence[Response], scores: Sequence[Scores] | None = None
) -> Path:
    """Writes every response, with its scores where there are any."""
    lines = []
    for i, (item, response) in enumerate(zip(suite.items, responses, strict=True)):
        row = {
            "key": item.key,
            "group": item.group,
            "response": response.text,
            "finished": response.finished,
            "truth": item.truth,
        }
        if response.prompt_cut:
            row["prompt_cut"] = True
        if scores is not None:
            clash = row.keys() & scores[i].keys()
            if clash:
                raise KeyError(f"{suite.name}: scores named {sorted(clash)}, which rows have already")
            row |= scores[i]
        lines.append(json.dumps(row) + "\n")
    path = items_path(output, suite)
    write_atomically(path, "".join(lines).encode())
    return path


def write_result(output: Path, suite: Suite, result: Result, compared: bool) -> Path:
    """Writes the summary, its intervals, the source, and the paper's rows where they are compared with."""
    content: dict[str, Any] = {"suite": suite.name, "n": result.n, **result.summary}
    content["bootstrap"] = {"draws": DRAWS, "seed": SEED, "coverage": COVERAGE}
    content["intervals"] = {key: list(interval) for key, interval in result.intervals.items()}
    if result.truncated is not None:
        content["truncated"] = result.truncated
    content |= result.source
    if compared:
        content["paper"] = {label: dict(row) for label, row in suite.paper().items()}
    path = output / f"{suite.name}.json"
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())
    return path


def show(suite: Suite, result: Result, compared: bool) -> None:
    """Prints the table, each value over its interval, the paper's rows above."""
    table = Table(title=Text(result.title))
    table.add_column("responses")
    for column in suite.columns:
        table.add_column(Text(column.heading), justify="right", no_wrap=True)
    known = result.truncated is not None
    for heading in ("n", "truncated")[: 1 + known]:
        table.add_column(heading, justify="right")
    if compared:
        for label, row in suite.paper().items():
            cells = [_cell(column, row.get(column.key)) for column in suite.columns]
            table.add_row(Text(f"paper: {label}"), *cells)
        table.add_section()
    cells = [
        _cell(column, result.summary.get(column.key), result.intervals.get(column.key))
        for column in suite.columns
    ]
    counts = [str(result.n), str(result.truncated)][: 1 + known]
    table.add_row(Text(result.label), *cells, *counts)
    print_table(table)


def print_table(table: Table) -> None:
    """Prints a table, at its own width where the output is no terminal."""
    console = Console()
    if not console.is_terminal:
        wide = Console(width=10_000)
        console = Console(width=max(console.width, wide.measure(table).maximum))
    console.print(table)


def _cell(column: Column, value: float | None, interval: Interval | None = None) -> Text:
    if value is None:
        return Text("-")
    text = f"{value * column.scale:.{column.digits}f}"
    if interval is not None:
        low, high = (f"{end * column.scale:.{column.digits}f}" for end in interval)
        text += f"\n[{low}, {high}]"
    return Text(text)
