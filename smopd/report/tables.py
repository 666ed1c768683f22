"""Result tables for a terminal and in Markdown, and averages over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True)
class Row:
    """Results of a run. A missing value is shown as "-"."""

    label: str
    run: str
    values: dict[str, float]
    spread: Mapping[str, float] = field(default_factory=dict)
    """Standard deviation over seeds, by column."""


def aggregate(results: Sequence[Sequence[Row]]) -> list[Row]:
    """Return means and unbiased standard deviations over seeds, of the columns that all seeds have."""
    found = []
    for first in results[0] if results else ():
        seeds = [row.values for rows in results for row in rows if row.run == first.run]
        columns = {
            name: [values[name] for values in seeds]
            for name in first.values
            if all(name in values for values in seeds)
        }
        means = {name: float(np.mean(values)) for name, values in columns.items()}
        spread = {name: float(np.std(values, ddof=1)) for name, values in columns.items() if len(seeds) > 1}
        found.append(Row(first.label, first.run, means, spread))
    return found


def table(rows: Sequence[Row], columns: Sequence[str]) -> Table:
    """Return a table for a terminal."""
    result = Table()
    result.add_column("run")
    for column in columns:
        result.add_column(Text(heading(column)), justify="right")
    for row in rows:
        result.add_row(Text(row.label), *(cell(row, column) for column in columns))
    return result


def markdown(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """Return a Markdown table."""
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
    spread = f" ± {row.spread[column]:.3f}" if column in row.spread else ""
    return f"{row.values[column]:.3f}{spread}"


def _pipe(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
