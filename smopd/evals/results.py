"""Results of an evaluation: SUITE_items.jsonl, SUITE.json and a table."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from smopd.engine.files import write_atomically
from smopd.evals.responses import Response
from smopd.evals.suite import Column, Scores, Suite

DRAWS = 2_000  # bootstrap samples; ours
SEED = 0  # ours: the same scores give the same intervals
COVERAGE = 0.95
ROW = ("key", "group", "response", "finished", "truth", "prompt_cut")  # all other entries of a row are scores

Interval = tuple[float, float]


def intervals(suite: Suite, groups: Sequence[str], scores: Sequence[Scores]) -> dict[str, Interval]:
    """Return the percentile bootstrap interval of each column; items are resampled within their group."""
    rows: dict[str, list[int]] = {}
    for row, group in enumerate(groups):
        rows.setdefault(group, []).append(row)
    blocks = [np.array(block) for block in rows.values()]
    drawn_groups = [group for group, block in rows.items() for _ in block]
    generator = np.random.default_rng(SEED)
    values: dict[str, list[float]] = {column.key: [] for column in suite.columns}
    for _ in range(DRAWS):
        picked = np.concatenate([block[generator.integers(block.size, size=block.size)] for block in blocks])
        drawn = suite.summary(drawn_groups, [scores[row] for row in picked.tolist()])
        for key, kept in values.items():
            value = drawn.get(key)
            if value is not None and math.isfinite(value):
                kept.append(value)
    tails = [50 * (1 - COVERAGE), 50 * (1 + COVERAGE)]
    found = {key: np.percentile(kept, tails).tolist() for key, kept in values.items() if kept}
    return {key: (low, high) for key, (low, high) in found.items()}


def write_items(
    output: Path, suite: Suite, responses: Sequence[Response], scores: Sequence[Scores] | None = None
) -> Path:
    """Write every response, with its scores if given."""
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
            if clash := set(ROW) & scores[i].keys():
                raise KeyError(f"{suite.name}: scores named {sorted(clash)}, expected names other than {ROW}")
            row |= scores[i]
        lines.append(json.dumps(row) + "\n")
    path = output / f"{suite.name}_items.jsonl"
    write_atomically(path, "".join(lines).encode())
    return path


def write_json(path: Path, content: Mapping[str, Any]) -> Path:
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())
    return path


def show(suite: Suite, title: str, label: str, content: Mapping[str, Any], counts: Mapping[str, int]) -> None:
    """Print the values with their intervals, then `counts`. The paper's rows come first."""
    table = Table(title=Text(title))
    table.add_column("responses")
    for column in suite.columns:
        table.add_column(Text(column.heading), justify="right", no_wrap=True)
    for heading in counts:
        table.add_column(heading, justify="right")
    for name, row in content.get("paper", {}).items():
        cells = [_cell(column, row.get(column.key)) for column in suite.columns]
        table.add_row(Text(f"paper: {name}"), *cells)
    table.add_section()
    found = content["intervals"]
    cells = [_cell(column, content.get(column.key), found.get(column.key)) for column in suite.columns]
    table.add_row(Text(label), *cells, *map(str, counts.values()))
    print_table(table)


def print_table(table: Table) -> None:
    """Print a table. If the output is not a terminal, use the table's full width."""
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
