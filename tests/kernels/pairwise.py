"""Combinations of factors such that every pair of values of two factors occurs in one."""

import itertools
from collections.abc import Sequence
from typing import Any


def _new_pairs(row: dict[str, Any], name: str, value: Any, open_pairs: set[tuple]) -> int:
    pairs = [(other, row[other], name, value) for other in row]
    return sum(pair in open_pairs or (*pair[2:], *pair[:2]) in open_pairs for pair in pairs)


def pairwise(factors: dict[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return the combinations, chosen greedily and deterministically."""
    names = list(factors)
    open_pairs = {
        (a, x, b, y) for a, b in itertools.combinations(names, 2) for x in factors[a] for y in factors[b]
    }
    rows = []
    while open_pairs:
        a, x, b, y = min(open_pairs, key=repr)
        row = {a: x, b: y}
        for name in (name for name in names if name not in row):
            gains = [_new_pairs(row, name, value, open_pairs) for value in factors[name]]
            row[name] = factors[name][gains.index(max(gains))]
        rows.append({name: row[name] for name in names})
        open_pairs -= {(a, row[a], b, row[b]) for a, b in itertools.combinations(names, 2)}
    return rows


def label(row: dict[str, Any]) -> str:
    """Return the test id of a combination."""
    words = (f"{name}:{value}" if isinstance(value, bool) else str(value) for name, value in row.items())
    return "-".join(words).replace(" ", "").replace("torch.", "")
