"""Result tables for a terminal and the report, and the methods' colors in the report and docs."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.table import Column, Table
from rich.text import Text

PALETTE = {
    "blue": "#3b82c4",
    "orange": "#d9822b",
    "green": "#2b9a5e",
    "red": "#cf4b4b",
    "gray": "#7c8794",
    "purple": "#8b62c9",
    "teal": "#2fa6ad",
    "pink": "#cc69a8",
    "brown": "#96714d",
    "olive": "#a59a1c",
}
"""Colors that are readable on white and on black."""
PREFERRED = {
    "specialize": ("blue", "orange", "teal", "olive"),
    "weights": ("green",),
    "published": ("red",),
    "train gdpo": ("gray",),
    "train batch_balanced": ("purple",),
    "train saw": ("pink",),
    "train": ("brown",),
}
"""Preferred colors by stage, by a merge's method, and by the estimator of a run from the base."""


class Row(NamedTuple):
    """Results of a run. A missing value is shown as "-", and a float with three digits."""

    label: str
    run: str
    values: dict[str, Any]


def table(rows: Sequence[Row], columns: Sequence[str]) -> Table:
    result = Table("run", *(Column(Text(heading(column)), justify="right") for column in columns))
    for row in rows:
        result.add_row(Text(row.label), *(cell(row, column) for column in columns))
    return result


def heading(column: str) -> str:
    """Return the heading of a column: `greedy/format_pass` -> `Greedy format pass`."""
    text = column.replace("/", " ").replace("_", " ")
    return text[:1].upper() + text[1:]


def cell(row: Row, column: str) -> str:
    value = row.values.get(column, "-")
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def assign(kinds: Mapping[str, str]) -> dict[str, str]:
    """Return the name of each run's color. `kinds` maps a run to its kind (see `kind` in summary.py)."""
    found: dict[str, str] = {}
    for i, (run, kind) in enumerate(sorted(kinds.items(), key=lambda item: item[1] not in PREFERRED)):
        preferred = (*PREFERRED.get(kind, ()), *PREFERRED.get(kind.partition(" ")[0], ()))
        free = [name for name in (*preferred, *PALETTE) if name not in found.values()]
        found[run] = free[0] if free else [*PALETTE][i % len(PALETTE)]
    return found
