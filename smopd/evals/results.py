"""Results of an evaluation: SUITE_items.jsonl, SUITE.json and a table; and the difference of two runs."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from smopd.engine.files import write_atomically
from smopd.evals.responses import Response, read_lines
from smopd.evals.suite import Column, Scores, Suite

DRAWS = 2_000  # bootstrap samples; ours
SEED = 0  # ours: the same scores give the same intervals
COVERAGE = 0.95
ROW = ("key", "group", "response", "finished", "truth", "prompt_cut")  # all other entries of a row are scores
CHANGES = ("won", "lost", "same", "unscored")

Interval = tuple[float, float]


def intervals(
    suite: Suite, groups: Sequence[str], scores: Sequence[Scores], *, draws: int = DRAWS
) -> dict[str, Interval]:
    """Return the percentile bootstrap interval of each column with a value.

    Items are resampled within their group, so that each group keeps its weight.
    """
    rows: dict[str, list[int]] = {}
    for row, group in enumerate(groups):
        rows.setdefault(group, []).append(row)
    blocks = [np.array(block) for block in rows.values()]
    drawn_groups = [group for group, block in rows.items() for _ in block]
    generator = np.random.default_rng(SEED)
    values: dict[str, list[float]] = {column.key: [] for column in suite.columns}
    for _ in range(draws):
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


@dataclass(frozen=True)
class Difference:
    """List what changed from one run of a suite to another, item by item."""

    a: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="A_items.jsonl")]
    """The items of run A."""
    b: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="B_items.jsonl")]
    """The items of run B."""
    score: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="(default: the first)")] = (
        None
    )
    """The score to compare: an item is won if it is higher in B."""


def compare_runs(command: Difference) -> None:
    """Print the items that were won or lost or have one score only, and counts by group.

    Raises:
        OSError, ValueError: a file has other rows, no item is in both files, or --score is not a score.
    """
    a, b = read_items(command.a), read_items(command.b)
    both = [key for key in a if key in b]
    if not both:
        raise ValueError(f"expected runs of the same items, got {len(a)} and {len(b)} with none in common")
    names = [name for name, value in a[both[0]].items() if name not in ROW and isinstance(value, int | float)]
    score = command.score or next(iter(names), "")
    values = [row.get(score, "") for key in both for row in (a[key], b[key])]
    if score in ROW or not all(isinstance(value, int | float | None) for value in values):
        raise ValueError(f"--score {score}: expected a number in every row, such as {', '.join(names)}")
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    table = Table("item", f"{score} A", f"{score} B", "change", title="What changed from A to B")
    for key in both:
        one, other = a[key][score], b[key][score]
        if one is None or other is None:
            change = "unscored"
        else:
            change = "same" if one == other else "lost" if one > other else "won"
        counts[a[key]["group"]][change] += 1
        if change != "same":
            table.add_row(Text(key), str(one), str(other), change)
    groups = Table("items", *CHANGES, title=Text(f"B against A by {score}"))
    for group, counted in [*counts.items(), ("all", sum(counts.values(), Counter[str]()))]:
        groups.add_row(Text(group), *(str(counted[change]) for change in CHANGES))
    print_table(table)
    print_table(groups)
    for name, run, other_run in (("A", a, b), ("B", b, a)):
        if alone := [key for key in run if key not in other_run]:
            print(f"only in {name}: {len(alone)} items, first {alone[0]!r}")


def read_items(path: Path) -> dict[str, dict[str, Any]]:
    """Return the rows of a SUITE_items.jsonl by key."""
    rows: dict[str, dict[str, Any]] = {}
    for number, row in read_lines(path):
        if not all(isinstance(row.get(name), str) for name in ("key", "group", "response")):
            raise ValueError(f"{path}: line {number}: expected key, group and response, got {sorted(row)}")
        if rows.setdefault(row["key"], row) is not row:
            raise ValueError(f"{path}: line {number}: expected each key once, got {row['key']!r} again")
    return rows
