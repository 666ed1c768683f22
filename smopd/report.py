"""What came out of the runs: a table for the terminal and for Markdown, and a self-contained report.html."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from rich.table import Table
from rich.text import Text

from smopd.files import write_atomically

_CHART_WIDTH, _CHART_HEIGHT, _CHART_LEFT, _CHART_TOP, _CHART_BOTTOM = 420, 180, 44, 10, 22
_CHART_POINTS = 200
_COLOURS = 8


@dataclass(frozen=True)
class Row:
    """One run's row. A column without a value is shown as "-"."""

    label: str
    run: str
    values: dict[str, float]
    spread: dict[str, float] | None = None
    """Standard deviation over seeds, by column."""


def aggregate(results: Sequence[Sequence[Row]]) -> list[Row]:
    """Rows of several seeds -> rows of means and unbiased standard deviations, in the first seed's order.

    NaN stays NaN. One seed has no spread.

    Raises:
        ValueError: the seeds differ in their runs, or a run's seeds in their columns.
    """
    if not results:
        return []
    runs = [row.run for row in results[0]]
    for i, rows in enumerate(results):
        if sorted(row.run for row in rows) != sorted(runs):
            raise ValueError(f"aggregate: result {i} has runs {[row.run for row in rows]}, expected {runs}")
    out = []
    for first in results[0]:
        seeds = [row for rows in results for row in rows if row.run == first.run]
        for row in seeds:
            if set(row.values) != set(first.values):
                got, expected = sorted(row.values), sorted(first.values)
                raise ValueError(f"aggregate: run {first.run!r} has columns {got}, expected {expected}")
        columns = {column: [row.values[column] for row in seeds] for column in first.values}
        means = {column: math.fsum(values) / len(values) for column, values in columns.items()}
        spread = (
            {column: _deviation(values) for column, values in columns.items()} if len(seeds) > 1 else None
        )
        out.append(Row(first.label, first.run, means, spread))
    return out


def table(rows: Sequence[Row], columns: Sequence[str]) -> Table:
    """The rows for a terminal."""
    result = Table()
    result.add_column("run")
    for column in columns:
        result.add_column(Text(heading(column)), justify="right")
    for row in rows:
        result.add_row(Text(row.label), *(cell(row, column) for column in columns))
    return result


def markdown(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| run | " + " | ".join(_pipe(heading(column)) for column in columns) + " |",
        "|---" + "|---:" * len(columns) + "|",
    ]
    for row in rows:
        cells = " | ".join(cell(row, column) for column in columns)
        lines.append(f"| {_pipe(row.label)} | {cells} |")
    return "\n".join(lines) + "\n"


def heading(column: str) -> str:
    """`greedy/format_pass` -> `greedy format pass`."""
    return column.replace("/", " ").replace("_", " ")


def cell(row: Row, column: str) -> str:
    """`0.912`, `0.912 ± 0.013` with a spread, or `-`."""
    if column not in row.values:
        return "-"
    text = f"{row.values[column]:.3f}"
    if row.spread is not None and column in row.spread:
        text += f" ± {row.spread[column]:.3f}"
    return text


def write_report(
    path: str | os.PathLike[str],
    title: str,
    caption: str,
    rows: Sequence[Row],
    columns: Sequence[str],
    settings_yaml: str,
    metrics: Mapping[str, Sequence[Mapping[str, Any]]],
    samples: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
) -> None:
    """Writes one HTML file that loads nothing from elsewhere; every text in it is escaped.

    Args:
        caption: stands under the table; an empty line begins a paragraph.
        metrics: run -> its lines of `metrics.jsonl`; drawn are `reward/NAME/mean`, `kl` and `teacher_mass`.
        samples: run -> some of its lines of `samples.jsonl`.
    """
    labels = {row.run: row.label for row in rows}
    parts = [
        f"<h1>{escape(title)}</h1>",
        _html_table(rows, columns),
        *(f"<p>{escape(text)}</p>" for text in caption.split("\n\n") if text.strip()),
        _charts(metrics, labels),
        _samples(samples or {}, labels),
        f"<details><summary>settings</summary><pre>{escape(settings_yaml)}</pre></details>",
    ]
    head, between, end = _PAGE.split("@")
    page = head + escape(title) + between + "\n".join(part for part in parts if part) + end
    write_atomically(path, page.encode("utf-8", "replace"))


def _html_table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    head = "".join(f"<th>{escape(heading(column))}</th>" for column in columns)
    body = "".join(
        f"<tr><th>{escape(row.label)}</th>"
        + "".join(f"<td>{cell(row, column)}</td>" for column in columns)
        + "</tr>\n"
        for row in rows
    )
    return f"<table><thead><tr><th>run</th>{head}</tr></thead>\n<tbody>{body}</tbody></table>"


def _charts(metrics: Mapping[str, Sequence[Mapping[str, Any]]], labels: Mapping[str, str]) -> str:
    keys = dict.fromkeys(key for lines in metrics.values() for line in lines for key in line)
    drawn = [key for key in keys if key.startswith("reward/") and key.endswith("/mean")]
    drawn += [key for key in ("kl", "teacher_mass") if key in keys]
    if not drawn:
        return ""
    colour = {run: f"c{i % _COLOURS}" for i, run in enumerate(metrics)}
    legend = " ".join(
        f'<span class="key {colour[run]}"><i></i>{escape(labels.get(run, run))}</span>' for run in metrics
    )
    figures = []
    for key in drawn:
        lines = {run: _points(run_lines, key) for run, run_lines in metrics.items()}
        figures.append(_chart(key, {run: points for run, points in lines.items() if points}, colour))
    return f"<h2>training</h2>\n<p>{legend}</p>\n<div class=charts>{''.join(figures)}</div>"


def _points(lines: Sequence[Mapping[str, Any]], key: str) -> list[tuple[int, float]]:
    """(step, value) of the finite values, at most about _CHART_POINTS of them, the last one always."""
    points = [(line["step"], line[key]) for line in lines if isinstance(line.get(key), int | float)]
    points = [(step, float(value)) for step, value in points if math.isfinite(value)]
    every = math.ceil(len(points) / _CHART_POINTS) or 1
    return points[::every] + points[len(points) - 1 :] if every > 1 else points


def _chart(key: str, lines: Mapping[str, list[tuple[int, float]]], colour: Mapping[str, str]) -> str:
    everything = [point for points in lines.values() for point in points]
    if not everything:
        return ""
    first, last = min(step for step, _ in everything), max(step for step, _ in everything)
    low, high = min(value for _, value in everything), max(value for _, value in everything)
    width, height = _CHART_WIDTH - _CHART_LEFT - 8, _CHART_HEIGHT - _CHART_TOP - _CHART_BOTTOM

    def x(step: int) -> float:
        return _CHART_LEFT + width * (step - first) / max(last - first, 1)

    def y(value: float) -> float:
        return _CHART_TOP + height * (1 - (value - low) / (high - low or 1.0))

    drawn = "".join(
        f'<polyline class="{colour[run]}" points="'
        + " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)
        + '"/>'
        for run, points in lines.items()
    )
    bottom, right = _CHART_TOP + height, _CHART_LEFT + width
    axis = f'<path class=axis d="M{_CHART_LEFT} {_CHART_TOP}V{bottom}H{right}"/>'
    ticks = [
        (_CHART_LEFT - 4, y(low), "end", f"{low:.3g}"),
        (_CHART_LEFT, _CHART_HEIGHT - 6, "start", str(first)),
    ]
    ticks.append((right, _CHART_HEIGHT - 6, "end", f"step {last}"))
    if high > low:
        ticks.append((_CHART_LEFT - 4, y(high) + 6, "end", f"{high:.3g}"))
    texts = "".join(
        f'<text x="{tx:.0f}" y="{ty:.0f}" text-anchor="{at}">{t}</text>' for tx, ty, at, t in ticks
    )
    name = escape(heading(key))
    box = f'viewBox="0 0 {_CHART_WIDTH} {_CHART_HEIGHT}"'
    svg = f'<svg {box} role=img aria-label="{name}">{axis}{drawn}{texts}</svg>'
    return f"<figure><figcaption>{name}</figcaption>{svg}</figure>"


def _samples(samples: Mapping[str, Sequence[Mapping[str, Any]]], labels: Mapping[str, str]) -> str:
    parts = []
    for run, lines in samples.items():
        texts = "".join(
            "<dl>"
            + "".join(f"<dt>{escape(str(k))}</dt><dd>{escape(str(v))}</dd>" for k, v in line.items())
            + "</dl>"
            for line in lines
        )
        if texts:
            name = escape(labels.get(run, run))
            parts.append(f"<details><summary>samples: {name}</summary>{texts}</details>")
    return "\n".join(parts)


def _deviation(values: list[float]) -> float:
    return statistics.stdev(values) if all(math.isfinite(value) for value in values) else math.nan


def _pipe(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


_PAGE = """<!DOCTYPE html>
<html lang=en><head><meta charset=utf-8><meta name=viewport content="width=device-width,initial-scale=1">
<title>@</title>
<style>
:root{color-scheme:light dark;--line:#8886}
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;display:block;overflow-x:auto}
th,td{padding:.25rem .8rem;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
th:first-child{text-align:left;font-weight:normal} thead th{font-weight:600!important}
pre,dd{white-space:pre-wrap;overflow-wrap:anywhere;font:13px/1.4 ui-monospace,monospace}
details{margin:1rem 0} dl{border-left:2px solid var(--line);padding-left:1rem} dd{margin:0 0 .5rem}
.charts{display:flex;flex-wrap:wrap;gap:1rem} figure{margin:0;flex:1 1 22rem;max-width:28rem}
svg{width:100%;height:auto} svg text{font-size:11px;fill:currentColor;opacity:.8}
.axis{fill:none;stroke:currentColor;opacity:.5} polyline{fill:none;stroke:var(--c);stroke-width:1.6}
.key{margin-right:1rem;white-space:nowrap} .key i{display:inline-block;width:1.4em;height:3px;
margin-right:.4em;vertical-align:middle;background:var(--c)}
.c0{--c:#3b82c4}.c1{--c:#d9822b}.c2{--c:#3a9d5d}.c3{--c:#c94c4c}.c4{--c:#8b62c9}.c5{--c:#8c6d4f}.c6{--c:#cc69a8}
.c7{--c:#7a8a99}
</style></head><body>
@
</body></html>
"""
