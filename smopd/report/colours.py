"""One color per method, for the report and the figures of the docs."""

from __future__ import annotations

from collections.abc import Mapping

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
    "train": ("gray", "purple", "brown"),
}
"""Colors of each stage, and for merges of each method."""


def assign(kinds: Mapping[str, str]) -> dict[str, str]:
    """Return the name of each run's color. `kinds` has each run's stage, or its method if it merges."""
    found: dict[str, str] = {}
    for i, (run, kind) in enumerate(kinds.items()):
        free = [name for name in (*PREFERRED.get(kind, ()), *PALETTE) if name not in found.values()]
        found[run] = free[0] if free else [*PALETTE][i % len(PALETTE)]
    return found
