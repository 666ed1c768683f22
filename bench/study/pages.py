"""Tables and figures of the pages, made from the stored results.

A page marks a table with a comment. The lines between this comment and the end mark are replaced:

    <!-- table EXPERIMENT VARIANT: COLUMN COLUMN ...; RUN RUN ... -->
    <!-- across EXPERIMENT COLUMN -->
    <!-- end -->

COLUMN and RUN are as in `table` and `across` of bench.study.results. A table without them shows all.
"""

from __future__ import annotations

import re
from pathlib import Path

from bench.study.experiments import EXPERIMENTS, RATES
from bench.study.results import Result, across, figure, found_map, read, table

_BLOCK = re.compile(
    r"(<!-- (table|across) (\S+) ([^\s:]+)(?:: ([^;]*?))?(?:; (.*?))? -->\n).*?(?=<!-- end -->)", re.S
)
FIGURES = {
    "equal_cost": (
        ("gdpo", "batch_balanced", "saw", "smopd_paper", "smopd", "sequential"),
        ("accuracy", "format"),
    )
}
"""Experiment -> runs and the two rewards of its figure."""
MAP = {
    "lr\n3e-4": "rarity_map {}_lr_0.0003",
    "lr\n1e-3": "rarity {}",
    "lr\n3e-3": "rarity_map {}_lr_0.003",
    "G\n4": "rarity_map {}_group_4",
    "G\n16": "rarity_map {}_group_16",
}
"""Column of the map -> experiment and variant. {} is the rate of the format in the demonstrations."""


def stored(results: Path, experiment: str, variant: str) -> list[Result]:
    """Return the stored results of a variant, sorted by seed."""
    paths = results.glob(f"{experiment}_{variant}_seed_*.json")
    return sorted((read(path) for path in paths), key=lambda result: result.seed)


def filled(page: str, results: Path) -> str:
    """Return the page with its tables made from the results. Raise ValueError if a table has no results."""

    def block(match: re.Match[str]) -> str:
        mark, kind, experiment, name, columns, runs = match.groups()
        if kind == "across":
            variants = {each: stored(results, experiment, each) for each in EXPERIMENTS[experiment].variants}
            return f"{mark}\n{across({each: r for each, r in variants.items() if r}, name)}\n\n"
        if not (found := stored(results, experiment, name)):
            raise ValueError(f"{mark.strip()}: no result of {experiment}, variant {name}, in {results}")
        baseline = EXPERIMENTS[experiment].baseline
        rows = table(found, baseline, (runs or "").split(), (columns or "").split())
        return f"{mark}\n{len(found)} seed{'s' * (len(found) > 1)}:\n\n{rows}\n\n"

    return _BLOCK.sub(block, page)


def draw(folder: Path, results: Path) -> None:
    for experiment, (runs, rewards) in FIGURES.items():
        figure(folder / f"{experiment}.png", stored(results, experiment, "base"), runs, rewards)
    cells = {
        (f"{rate:.2%}", column): stored(results, *where.format(f"rate_{rate:g}").split())
        for rate in RATES
        for column, where in MAP.items()
    }
    found_map(folder / "rarity.png", cells, ("gdpo", "batch_balanced", "saw"))
