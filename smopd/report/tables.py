"""Rows of results: averaged over seeds, and shown in a terminal and in Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text


@dataclass(frozen=True)
class Row:
    """One run's row. A column without a value is shown as "-"."""

    label: str
    run: str
    values: dict[str, float]
    spread: dict[str, float] | None = None
    """Standard deviation over seeds, by column."""


def aggregate(results: Sequence[Sequence[Row]]) -> list[Row]:
    """Rows of several seeds -> rows of means and unbiased standard deviations, in the first seed's order.

    NaN stays NaN. One seed has no spread.

    Raises:
        ValueError: the seeds differ in their runs, or a run's seeds in their columns.
    """
    if not results:
        return []
    runs = [row.run for row in results[0]]
    for i, rows in enumerate(results):
        if sorted(row.run for row in rows) != sorted(runs):
            raise ValueError(f"aggregate: result {i} has runs {[row.run for row in rows]}, expected {runs}")
    out = []
    for first in results[0]:
        seeds = [row for rows in results for row in rows if row.run == first.run]
        for row in seeds:
            if set(row.values) != set(first.values):
                got, expected = sorted(row.values), sorted(first.values)
                raise ValueError(f"aggregate: run {first.run!r} has columns {got}, expected {expected}")
        columns = {column: [row.values[column] for row in seeds] for column in first.values}
        means = {column: math.fsum(values) / len(values) for column, values in columns.items()}
        spread = (
            {column: _deviation(values) for column, values in columns.items()} if len(seeds) > 1 else None
        )
        out.append(Row(first.label, first.run, means, spread))
    return out


def table(rows: Sequence[Row], columns: Sequence[str]) -> Table:
    """The rows for a terminal."""
    result = Table()
    result.add_column("run")
    for column in columns:
        result.add_column(Text(heading(column)), justify="right")
    for row in rows:
        result.add_row(Text(row.label), *(cell(row, column) for column in columns))
    return result


def markdown(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| run | " + " | ".join(_pipe(heading(column)) for column in columns) + " |",
        "|---" + "|---:" * len(columns) + "|",
    ]
    for row in rows:
        cells = " | ".join(cell(row, column) for column in columns)
        lines.append(f"| {_pipe(row.label)} | {cells} |")
    return "\n".join(lines) + "\n"


def heading(column: str) -> str:
    """`greedy/format_pass` -> `greedy format pass`."""
    return column.replace("/", " ").replace("_", " ")


def cell(row: Row, column: str) -> str:
    """`0.912`, `0.912 ± 0.013` with a spread, or `-`."""
    if column not in row.values:
        return "-"
    text = f"{row.values[column]:.3f}"
    if row.spread is not None and column in row.spread:
        text += f" ± {row.spread[column]:.3f}"
    return text


def _deviation(values: list[float]) -> float:
    return statistics.stdev(values) if all(math.isfinite(value) for value in values) else math.nan


def _pipe(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
