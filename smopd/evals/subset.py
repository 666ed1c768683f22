"""A part of a suite's items, the same every time, for a first look: `--limit`."""

from __future__ import annotations

from collections.abc import Sequence


def spread(groups: Sequence[str], limit: int) -> list[int]:
    """Indices of `limit` items, ascending: each group by its share, evenly spread inside it.

    Args:
        groups: of each item.
    Returns:
        All indices where there are no more than `limit` items.
    Raises:
        ValueError: limit is below the number of groups, each of which gives one at least.
    """
    members: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    if limit < len(members):
        raise ValueError(f"--limit is {limit}, expected at least {len(members)}, one item of each group")
    if limit >= len(groups):
        return list(range(len(groups)))
    counts = _shares([len(found) for found in members.values()], limit)
    return sorted(
        found[(2 * i + 1) * len(found) // (2 * count)]
        for found, count in zip(members.values(), counts, strict=True)
        for i in range(count)
    )


def _shares(sizes: Sequence[int], limit: int) -> list[int]:
    """Whole numbers near limit * size / sum(sizes), each at least 1, whose sum is limit."""
    exact = [limit * size / sum(sizes) for size in sizes]
    counts = [max(1, int(share)) for share in exact]
    while sum(counts) != limit:
        step = 1 if sum(counts) < limit else -1
        open_ones = [i for i, count in enumerate(counts) if step > 0 or count > 1]
        furthest = max(open_ones, key=lambda i: step * (exact[i] - counts[i]))
        counts[furthest] += step
    return counts
