"""Lists what changed between two runs of a suite, item by item: `python -m smopd.evaluate diff A B`."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.table import Table
from rich.text import Text

from smopd.engine.files import write_atomically
from smopd.evals.options import read_lines
from smopd.evals.results import ROW, print_table

CHANGES = ("won", "lost", "same", "unscored")


@dataclass(frozen=True)
class Difference:
    """List what changed from one run of a suite to another, item by item."""

    a: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="A_items.jsonl")]
    """The items of one run."""
    b: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="B_items.jsonl")]
    """Those of the other."""
    score: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="(default: the first)")] = (
        None
    )
    """The score by which an item is won (higher in B), lost or the same."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """A JSON file to write, with both rows of each item."""


def compare_runs(command: Difference) -> None:
    """Prints the items that were won, lost or scored in one run alone, and counts by group.

    Raises:
        FileNotFoundError, ValueError: a file is no run's items, no item is in both, or --score is no score.
    """
    a, b = read_items(command.a), read_items(command.b)
    both = [key for key in a if key in b]
    if not both:
        raise ValueError(f"expected runs of the same items, got none in both of {len(a)} and {len(b)}")
    if command.output is not None and command.output.is_dir():
        raise ValueError(f"--output {command.output}: is a folder, expected a file")
    names = [name for name, value in a[both[0]].items() if name not in ROW and isinstance(value, int | float)]
    score = command.score or next(iter(names), None)
    if score is None or any(score not in row or score in ROW or not isinstance(row[score], int | float | None)
                            for key in both for row in (a[key], b[key])):  # fmt: skip
        raise ValueError(
            f"--score {score}: expected a number in every row, such as {', '.join(names) or 'none'}"
        )
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    items = []
    table = Table("item", f"{score} A", f"{score} B", "change", title="What changed from A to B")
    for key in both:
        one, other = a[key][score], b[key][score]
        known = one is not None and other is not None
        change = CHANGES[2 if one == other else int(one > other)] if known else "unscored"
        counts[a[key]["group"]][change] += 1
        items.append({"key": key, "change": change, "a": a[key], "b": b[key]})
        if change != "same":
            table.add_row(Text(key), str(one), str(other), change)
    total = sum(counts.values(), Counter[str]())
    groups = Table("items", *CHANGES, title=Text(f"B against A by {score}"))
    for group, counted in [*counts.items(), ("all", total)]:
        groups.add_row(Text(group), *(str(counted[change]) for change in CHANGES))
    for each in (table, groups):
        print_table(each)
    only = {"only_a": [key for key in a if key not in b], "only_b": [key for key in b if key not in a]}
    for name, keys in only.items():
        if keys:
            print(f"{name}: {len(keys)} items, first {keys[0]!r}")
    if command.output is not None:
        content = {"score": score, "total": {name: total[name] for name in CHANGES}, "items": items, **only}
        write_atomically(command.output, (json.dumps(content, indent=2) + "\n").encode())
        print(f"wrote {command.output}")


def read_items(path: Path) -> dict[str, dict[str, Any]]:
    """The rows of a SUITE_items.jsonl by their keys.

    Raises:
        FileNotFoundError, ValueError: no such file, a row without a key, group or response, or a key twice.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file, expected the items of a run (SUITE_items.jsonl)")
    rows: dict[str, dict[str, Any]] = {}
    for number, row in read_lines(path):
        if not all(isinstance(row.get(name), str) for name in ("key", "group", "response")):
            raise ValueError(f"{path}: line {number}: expected key, group and response, got {sorted(row)}")
        if rows.setdefault(row["key"], row) is not row:
            raise ValueError(f"{path}: line {number}: expected every key once, got {row['key']!r} again")
    return rows
