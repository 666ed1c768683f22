"""What changed between two runs of a suite, item by item: `python -m smopd.evaluate diff A B`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.table import Table
from rich.text import Text

from smopd.engine.files import write_atomically
from smopd.evals.responses import read_lines
from smopd.evals.results import print_table

Rows = Mapping[str, Mapping[str, Any]]
NOT_SCORES = ("key", "group", "response", "finished", "truth", "prompt_cut")
CLASS = "outcome"
CHANGES = ("won", "lost", "same", "unscored")


@dataclass(frozen=True)
class Difference:
    """List what changed from one run of a suite to another, item by item."""

    a: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="A_items.jsonl")]
    """The items of one run."""
    b: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="B_items.jsonl")]
    """Those of the other."""
    score: Annotated[
        str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="(default: the rows' first score)")
    ] = None
    """The score by which an item is won (higher in B), lost or the same."""
    by: Annotated[
        str | None,
        tyro.conf.arg(metavar="NAME", help_behavior_hint=f"(default: {CLASS}, where it is)"),
    ] = None
    """A text among the scores whose values are counted pairwise."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """A JSON file to write, with both responses to each changed item."""


@dataclass(frozen=True)
class Compared:
    """Two runs over the items that both have.

    Attributes:
        score, by: the names that were compared.
        counts: of won, lost, same and unscored, by group.
        pairs: (class in A, class in B) -> items.
        changed: (key, change) of the items whose score or class differs.
        only_a, only_b: keys of the other items.
    """

    score: str
    by: str | None
    counts: Mapping[str, Counter[str]]
    pairs: Counter[tuple[str, str]]
    changed: Sequence[tuple[str, str]]
    only_a: Sequence[str]
    only_b: Sequence[str]

    @property
    def total(self) -> Counter[str]:
        return sum(self.counts.values(), Counter())


def compare_runs(command: Difference) -> None:
    """Reads, compares, shows and, if asked, writes.

    Raises:
        FileNotFoundError, ValueError: a file is no run's items, no item is in both, or a name is no score.
    """
    a, b = read_items(command.a), read_items(command.b)
    if command.output is not None and command.output.is_dir():
        raise ValueError(f"--output {command.output}: is a folder, expected a file")
    compared = compare(a, b, score=command.score, by=command.by)
    if command.output is not None:
        content = as_json(compared, a, b) | {"a": str(command.a), "b": str(command.b)}
        write_atomically(command.output, (json.dumps(content, indent=2) + "\n").encode())
    _show(compared, a, b)
    if command.output is not None:
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
        if row["key"] in rows:
            raise ValueError(f"{path}: line {number}: expected every key once, got {row['key']!r} again")
        rows[row["key"]] = row
    return rows


def compare(a: Rows, b: Rows, *, score: str | None = None, by: str | None = None) -> Compared:
    """Item by item; `score` and `by` as for `Difference`.

    Raises:
        ValueError: no item is in both, or a name is no score of theirs.
    """
    shared = [key for key in a if key in b]
    if not shared:
        raise ValueError(f"expected runs of the same items, got none in both of {len(a)} and {len(b)}")
    rows = [(key, a[key], b[key]) for key in shared]
    score = score or _first_score(rows[0][1])
    if by is None and all(CLASS in row for _, one, other in rows for row in (one, other)):
        by = CLASS
    counts: dict[str, Counter[str]] = {}
    pairs: Counter[tuple[str, str]] = Counter()
    changed = []
    for key, one, other in rows:
        change = _change(_number(one, score), _number(other, score))
        counts.setdefault(one["group"], Counter())[change] += 1
        classes = (_class(one, by), _class(other, by)) if by else ("", "")
        pairs[classes] += by is not None
        if change in ("won", "lost") or classes[0] != classes[1]:
            changed.append((key, change))
    only_a, only_b = [key for key in a if key not in b], [key for key in b if key not in a]
    return Compared(score, by, counts, pairs, changed, only_a, only_b)


def as_json(compared: Compared, a: Rows, b: Rows) -> dict[str, Any]:
    """All of it, with the whole rows of the items that changed."""
    return {
        "score": compared.score,
        "by": compared.by,
        "total": {name: compared.total[name] for name in CHANGES},
        "groups": {
            group: {name: counts[name] for name in CHANGES} for group, counts in compared.counts.items()
        },
        "pairs": [{"a": one, "b": other, "n": n} for (one, other), n in _ordered(compared.pairs)],
        "changed": [
            {"key": key, "change": change, "a": a[key], "b": b[key]} for key, change in compared.changed
        ],
        "only_a": list(compared.only_a),
        "only_b": list(compared.only_b),
    }


def _first_score(row: Mapping[str, Any]) -> str:
    scores = [
        name for name, value in row.items() if name not in NOT_SCORES and isinstance(value, int | float)
    ]
    if not scores:
        raise ValueError(f"expected a score in the rows, got only {sorted(row)}")
    return scores[0]


def _number(row: Mapping[str, Any], score: str) -> float | None:
    value = row.get(score)
    if score in NOT_SCORES or score not in row or not isinstance(value, int | float | None):
        numbers = [
            name for name in row if name not in NOT_SCORES and isinstance(row[name], int | float | None)
        ]
        raise ValueError(
            f"--score {score}: item {row['key']!r} has no such number, expected one of {', '.join(numbers)}"
        )
    return None if value is None else float(value)


def _class(row: Mapping[str, Any], by: str) -> str:
    value = row.get(by)
    if by in NOT_SCORES or by not in row or not isinstance(value, str | None):
        raise ValueError(f"--by {by}: item {row['key']!r} has no such text among its scores")
    return "-" if value is None else value


def _change(one: float | None, other: float | None) -> str:
    if one is None or other is None:
        return "unscored"
    return "same" if one == other else "won" if other > one else "lost"


def _ordered(pairs: Counter[tuple[str, str]]) -> list[tuple[tuple[str, str], int]]:
    found = [(pair, n) for pair, n in pairs.items() if n]
    return sorted(found, key=lambda entry: (-entry[1], entry[0]))


def _show(compared: Compared, a: Rows, b: Rows) -> None:
    score, by = compared.score, compared.by
    if compared.changed:
        headings = ["item", f"{score} A", f"{score} B", *([f"{by} A", f"{by} B"] if by else [])]
        table = _table("What changed from A to B", *headings, "change")
        for key, change in compared.changed:
            cells = [key, *(_short(row[key][score]) for row in (a, b))]
            cells += [_class(row[key], by) for row in (a, b)] if by else []
            table.add_row(*map(Text, cells), change)
        print_table(table)
    if by:
        table = _table(f"Pairs of {by}", f"{by} A", f"{by} B", "items")
        for (one, other), n in _ordered(compared.pairs):
            table.add_row(Text(one), Text(other), str(n))
        print_table(table)
    table = _table(f"B against A by {score}", "items", *CHANGES)
    for group, counts in [*compared.counts.items(), ("all", compared.total)]:
        table.add_row(Text(group), *(str(counts[name]) for name in CHANGES))
    print_table(table)
    for name, keys in (("A", compared.only_a), ("B", compared.only_b)):
        if keys:
            print(f"{len(keys)} items only in {name}, first {keys[0]!r}")


def _table(title: str, *headings: str) -> Table:
    table = Table(title=Text(title))
    for heading in headings:
        table.add_column(Text(heading))
    return table


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
