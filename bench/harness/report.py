"""Rows as one table, in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

HEADER = (
    "operation and case",
    "provider",
    "ms",
    "p20 to p80",
    "x eager",
    "of ceiling",
    "MiB",
    "error",
)
"""error: the largest of a value, in nats, or of a linear head as a share of the norm; not of gradients."""


def table(rows: Sequence[dict]) -> Iterator[str]:
    """The lines: where it was measured, then a line a row."""
    keys = ("device", "threads", "torch", "triton", "driver", "python", "commit")
    places = dict.fromkeys(", ".join(f"{key} {row.get(key)}" for key in keys if row.get(key)) for row in rows)
    yield f"Measured with {'; '.join(places)}.\n"
    yield f"| {' | '.join(HEADER)} |"
    yield f"|---|---|{'---:|' * (len(HEADER) - 2)}"
    eager: dict[tuple, float] = {}
    for row in rows:
        if row.get("kind") == "eager" and row.get("of_ceiling"):
            eager.setdefault((row.get("benchmark"), row.get("case")), row["of_ceiling"])
    for row in rows:
        yield f"| {' | '.join(_cells(row, eager.get((row.get('benchmark'), row.get('case')))))} |"


def _cells(row: dict, eager: float | None) -> tuple[str, ...]:
    computes = f" ({row['computes']})" if "computes" in row else ""
    head = (f"{row.get('benchmark')} {row.get('case', '')}", f"{row.get('provider', '')}{computes}")
    for word in ("left_out", "refused"):
        if word in row:
            return (*head, f"{word.replace('_', ' ')}: {row[word]}", *[""] * (len(HEADER) - 3))
    share = row.get("of_ceiling")
    times = row.get("times_eager")  # of older rows
    if times is None and share and eager:  # each beside its own ceiling, so that the machine's moods cancel
        times = share / eager
    errors = [error for name, error in row.get("errors", {}).items() if not name.startswith("d")]
    return (
        *head,
        _number(row.get("ms"))
        + (f" ({1e3 * row['graph_ms']:.3g} us in a graph)" if row.get("graph_ms") else ""),
        f"{_number(row['p20_ms'])} to {_number(row['p80_ms'])}" if "p20_ms" in row else "",
        _number(times),
        f"{share:.0%} of {row['ceiling']}" if share else "",
        _number(row.get("peak_mib")),
        _number(max(errors, default=None)),
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
