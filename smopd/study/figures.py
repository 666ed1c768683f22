"""The study's figures as SVG: lines with a band of one deviation, dots by seed, bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smopd.study.measures import Spread

Curve = Sequence[tuple[float, Spread]]


@dataclass(frozen=True)
class Axes:
    """Titles and scales of one panel."""

    title: str
    x: str
    y: str
    log_x: bool = False
    bottom: float | None = None
    top: float | None = None


def lines(path: Path, panels: Sequence[tuple[Axes, Mapping[str, Curve]]]) -> None:
    """One panel beside another, a line a label; the same label has the same colour in all."""
    figure, drawn = _open(len(panels))
    colours = _colours(label for _, curves in panels for label in curves)
    for axes, (what, curves) in zip(drawn, panels, strict=True):
        for label, curve in curves.items():
            x = [at for at, _ in curve]
            mean = [value.mean for _, value in curve]
            axes.plot(x, mean, label=label, color=colours[label], linewidth=1.4)
            if len(x) > 1:
                low, high = ([v.mean + sign * v.deviation for _, v in curve] for sign in (-1, 1))
                axes.fill_between(x, low, high, color=colours[label], alpha=0.15, linewidth=0)
        _label(axes, what)
    _close(figure, drawn, path)


def dots(path: Path, panels: Sequence[tuple[Axes, Mapping[str, Sequence[tuple[float, float]]]]]) -> None:
    """One dot a seed: (x, y) by label."""
    figure, drawn = _open(len(panels))
    colours = _colours(label for _, series in panels for label in series)
    for axes, (what, series) in zip(drawn, panels, strict=True):
        for i, (label, points) in enumerate(series.items()):
            shift = 1 + 0.06 * (i - (len(series) - 1) / 2) if what.log_x else 1.0
            axes.plot([x * shift for x, _ in points], [y for _, y in points], "o", markersize=4,
                      label=label, color=colours[label], alpha=0.8)  # fmt: skip
        _label(axes, what)
    _close(figure, drawn, path)


def bars(path: Path, panels: Sequence[tuple[Axes, Mapping[str, Spread]]]) -> None:
    """A bar a label, with its deviation."""
    figure, drawn = _open(len(panels))
    for axes, (what, values) in zip(drawn, panels, strict=True):
        places = range(len(values))
        axes.barh(
            list(places),
            [value.mean for value in values.values()],
            xerr=[value.deviation for value in values.values()],
            color="#4878a8",
            height=0.7,
        )
        axes.set_yticks(list(places), list(values), fontsize=7)
        axes.invert_yaxis()
        axes.set_title(what.title, fontsize=9)
        axes.set_xlabel(what.x, fontsize=8)
    _close(figure, drawn, path, legend=False)


def _open(n: int) -> tuple[Any, list[Any]]:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "smopd"  # the same numbers, the same file
    from matplotlib import pyplot

    figure, drawn = pyplot.subplots(1, n, figsize=(4.4 * n, 3.2), squeeze=False, layout="constrained")
    return figure, list(drawn[0])


def _colours(labels: Any) -> dict[str, str]:
    return {label: f"C{i % 10}" for i, label in enumerate(dict.fromkeys(labels))}


def _label(axes: Any, what: Axes) -> None:
    axes.set_title(what.title, fontsize=9)
    axes.set_xlabel(what.x, fontsize=8)
    axes.set_ylabel(what.y, fontsize=8)
    axes.tick_params(labelsize=7)
    if what.log_x:
        axes.set_xscale("log")
    axes.set_ylim(what.bottom, what.top)
    axes.grid(alpha=0.2)


def _shown(axes: Any) -> list[tuple[Any, str]]:
    handles, labels = axes.get_legend_handles_labels()
    return list(zip(handles, labels, strict=True))


def _close(figure: Any, drawn: Sequence[Any], path: Path, legend: bool = True) -> None:
    from matplotlib import pyplot

    if legend:
        found = {label: line for axes in drawn for line, label in _shown(axes)}
        figure.legend(found.values(), found, loc="outside lower center", ncols=4, fontsize=7, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None})
    pyplot.close(figure)
