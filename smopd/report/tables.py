"""Result tables for a terminal and the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text


@dataclass(frozen=True)
class Row:
    """Results of a run. A missing value is shown as "-", a fraction with three digits."""

    label: str
    run: str
    values: dict[str, Any]


def table(rows: Sequence[Row], columns: Sequence[str]) -> Table:
    """Return a table for a terminal."""
    result = Table()
    result.add_column("run")
    for column in columns:
        result.add_column(Text(heading(column)), justify="right")
    for row in rows:
        result.add_row(Text(row.label), *(cell(row, column) for column in columns))
    return result


def heading(column: str) -> str:
    """`greedy/format_pass` -> `Greedy format pass`."""
    text = column.replace("/", " ").replace("_", " ")
    return text[:1].upper() + text[1:]


def cell(row: Row, column: str) -> str:
    value = row.values.get(column, "-")
    return f"{value:.3f}" if isinstance(value, float) else str(value)
