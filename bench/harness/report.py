"""Rows as a table or a plot."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

HEADER = ("provider", "median ms", "p20 to p80", "x eager", "of ceiling", "peak MiB", "error", "of bound")
"""error: the largest of a value, in nats, or of a linear head as a share of the norm;
of bound: as a share of what ours may be off, gradients too."""


def grouped(rows: list[dict]) -> dict[tuple[str, str], list[dict]]:
    """(benchmark, case) -> its rows, as they came."""
    groups: dict[tuple[str, str], list[dict]] = {}
    for row in rows:
        groups.setdefault((row.get("benchmark", "?"), row.get("case", "")), []).append(row)
    return groups


def table(rows: list[dict]) -> int:
    """Prints Markdown, or rich tables on a terminal where rich is installed."""
    if sys.stdout.isatty():
        try:
            return _rich(rows)
        except ImportError:
            pass
    print("\n".join(markdown(rows)))
    return 0


def cells(row: dict) -> tuple[str, ...]:
    """A row's cells, in HEADER's order."""
    name = row.get("provider", "all")
    if "computes" in row:
        name = f"{name} ({row['computes']})"
    if reason := row.get("left_out"):
        return (name, f"left out: {reason}", *[""] * (len(HEADER) - 2))
    if reason := row.get("refused"):
        return (name, f"refused: {reason}", *[""] * (len(HEADER) - 2))
    share = row.get("of_ceiling")
    rate = _rate(row)
    return (
        name,
        _number(row.get("ms")),
        f"{_number(row.get('p20_ms'))} to {_number(row.get('p80_ms'))}" if "p20_ms" in row else "",
        _number(row.get("times_eager")),
        rate or ("" if share is None else f"{share:.0%} of {row['ceiling']}"),
        _number(row.get("peak_mib")),
        _number(max(_terms(row).values(), default=None)),
        _number(row.get("of_bound")),
    )


def _terms(row: dict) -> dict[str, float]:
    """Errors of values; a gradient's has its own scale, and `of bound` covers it."""
    errors = row.get("errors", {})
    return {name: error for name, error in errors.items() if not name.startswith("d")}


def _rate(row: dict) -> str:
    if "gb_per_s" in row:
        return f"{row['gb_per_s']:g} GB/s"
    return f"{row['gflop_per_s']:g} GFLOP/s" if "gflop_per_s" in row else ""


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _place(rows: list[dict]) -> str:
    """Where they were measured, each place once."""
    keys = ("device", "threads", "torch", "triton", "python", "commit")
    places = dict.fromkeys(", ".join(f"{key} {row.get(key)}" for key in keys if row.get(key)) for row in rows)
    return "; ".join(places)


def markdown(rows: list[dict]) -> Iterator[str]:
    """The lines of a table a case."""
    yield f"Measured with {_place(rows)}."
    for (benchmark, case), members in grouped(rows).items():
        yield f"\n**{benchmark}**, {case}\n"
        yield f"| {' | '.join(HEADER)} |"
        yield f"|---|{'---:|' * (len(HEADER) - 1)}"
        for row in members:
            yield f"| {' | '.join(cells(row))} |"


def _rich(rows: list[dict]) -> int:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(f"Measured with {_place(rows)}.", style="dim")
    for (benchmark, case), members in grouped(rows).items():
        shown = Table(title=f"{benchmark}  {case}", title_justify="left")
        for number, name in enumerate(HEADER):
            shown.add_column(name, justify="left" if number == 0 else "right")
        for row in members:
            style = {"ours": "bold", "ceiling": "dim"}.get(row.get("kind", ""), "")
            shown.add_row(*cells(row), style="red" if "refused" in row else style)
        console.print(shown)
    return 0


def plot(rows: list[dict], image: Path) -> int:
    """A bar a provider, from p20 to p80 the whisker, the ceiling a line.

    Raises:
        ValueError: matplotlib is not installed, or no row has a time.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise ValueError("matplotlib is not installed, expected for plots") from None
    groups = {
        key: timed
        for key, members in grouped(rows).items()
        if (timed := [row for row in members if "ms" in row and row.get("kind") != "ceiling"])
    }
    if not groups:
        raise ValueError("no row has a time")
    heights = [1.0 + 0.3 * len(members) for members in groups.values()]
    figure, axes = pyplot.subplots(
        len(groups), 1, figsize=(8, sum(heights)), height_ratios=heights, squeeze=False, layout="constrained"
    )
    for axis, ((benchmark, case), members) in zip(axes[:, 0], groups.items(), strict=True):
        colours = {"ours": "tab:blue", "peer": "tab:orange"}
        axis.barh(
            [row["provider"] for row in members],
            [row["ms"] for row in members],
            xerr=[
                [row["ms"] - row["p20_ms"] for row in members],
                [row["p80_ms"] - row["ms"] for row in members],
            ],
            color=[colours.get(row.get("kind", ""), "tab:gray") for row in members],
        )
        shares = [row["ms"] * row["of_ceiling"] for row in members if row.get("of_ceiling")]
        if shares:
            axis.axvline(shares[0], color="black", linestyle="--", linewidth=0.8)
        axis.set_xscale("log")
        axis.invert_yaxis()
        axis.set_title(f"{benchmark}  {case}", loc="left", fontsize=9)
        axis.set_xlabel("ms", fontsize=8)
    figure.suptitle(_place(rows), fontsize=7)
    figure.savefig(image, dpi=150)
    print(image)
    return 0
