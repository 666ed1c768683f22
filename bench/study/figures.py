"""The study's figures as PNG: lines with a band of one deviation, dots by seed, bars, bars in groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.study.measures import Spread

Curve = Sequence[tuple[float, Spread]]
PIXELS = 110  # an inch


class Axes(NamedTuple):
    """Titles and scales of one panel; `marks` are dashed lines across it, `apart` separates labels in x."""

    title: str
    x: str
    y: str
    log_x: bool = False
    bottom: float | None = None
    top: float | None = None
    marks: tuple[float, ...] = ()
    apart: float = 0.0


class Dot(NamedTuple):
    """A point; an open triangle where what it shows was not reached."""

    x: float
    y: float
    reached: bool = True


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


def dots(path: Path, panels: Sequence[tuple[Axes, Mapping[str, Sequence[Dot]]]]) -> None:
    """One dot a seed, by label."""
    figure, drawn = _open(len(panels))
    colours = _colours(label for _, series in panels for label in series)
    for axes, (what, series) in zip(drawn, panels, strict=True):
        for i, (label, points) in enumerate(series.items()):
            place = i - (len(series) - 1) / 2
            shift = 1 + 0.06 * place if what.log_x else 1.0
            for reached, marker, face in ((True, "o", colours[label]), (False, "^", "none")):
                chosen = [(x * shift + what.apart * place, y) for x, y, found in points if found is reached]
                if chosen or reached:
                    axes.plot(*zip(*chosen, strict=True) if chosen else ([], []), marker, markersize=4,
                              label=label if reached else None, color=colours[label],
                              markerfacecolor=face, alpha=0.8)  # fmt: skip
        _label(axes, what)
    _close(figure, drawn, path)


def grouped(path: Path, panels: Sequence[tuple[Axes, Mapping[str, Mapping[str, Spread]]]]) -> None:
    """Bars beside each other, by group and label, with their deviations."""
    figure, drawn = _open(len(panels))
    colours = _colours(label for _, groups in panels for values in groups.values() for label in values)
    for axes, (what, groups) in zip(drawn, panels, strict=True):
        labels = list(dict.fromkeys(label for values in groups.values() for label in values))
        width = 0.8 / max(1, len(labels))
        for i, label in enumerate(labels):
            there = [(at, values[label]) for at, values in enumerate(groups.values()) if label in values]
            axes.bar(
                [at + (i - (len(labels) - 1) / 2) * width for at, _ in there],
                [value.mean for _, value in there],
                width,
                yerr=[value.deviation for _, value in there],
                label=label,
                color=colours[label],
            )
        axes.axhline(0, color="black", linewidth=0.6)
        _label(axes, what)
        axes.set_xticks(range(len(groups)), list(groups), fontsize=7)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, fontsize=6, frameon=False)
    _close(figure, drawn, path, legend=False)


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

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, drawn = pyplot.subplots(1, n, figsize=(4.4 * n, 3.2), squeeze=False, layout="constrained")
    return figure, list(drawn[0])


def _colours(labels: Any) -> dict[str, str]:
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    every = list(dict.fromkeys(labels))
    maps = ("tab10",) if len(every) <= 10 else ("tab20", "tab20b")
    of = [colour for name in maps for colour in colormaps[name].colors]
    return {label: to_hex(of[i % len(of)]) for i, label in enumerate(every)}


def _label(axes: Any, what: Axes) -> None:
    axes.set_title(what.title, fontsize=9)
    axes.set_xlabel(what.x, fontsize=8)
    axes.set_ylabel(what.y, fontsize=8)
    axes.tick_params(which="both", labelsize=7)
    if what.log_x:
        axes.set_xscale("log")
    axes.set_ylim(what.bottom, what.top)
    for mark in what.marks:
        axes.axhline(mark, color="grey", linewidth=0.8, linestyle="--")
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
    figure.savefig(path, dpi=PIXELS, metadata={"Software": None})  # the same numbers, the same file
    pyplot.close(figure)
