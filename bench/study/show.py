"""Tables (Markdown) and figures (PNG) of kept results."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.study.experiments import EXPERIMENTS
from bench.study.results import Result, best, difference, spread

KINDS = ("greedy", "sampled")
WINDOW = 5  # steps that a drawn curve is the trailing mean of
PIXELS = 110  # an inch


def table(experiment: str, results: Sequence[Result]) -> str:
    """A run a row: its steps, held-out rewards as mean ± deviation over seeds, difference to the baseline."""
    first = results[0]
    rewards = [*(reward["name"] for reward in first.settings["rewards"]), "sum"]
    columns = [f"{kind}/{reward}" for kind in KINDS for reward in rewards]
    against = [name for name in EXPERIMENTS[experiment].baselines if name in first.labels]
    baseline = best(*([result.value(name, "sampled/sum") for result in results] for name in against))
    rows = []
    for run, label in first.labels.items():
        values = {column: [result.value(run, column) for result in results] for column in columns}
        if run in first.runs:
            steps = first.steps.get(run)
            apart = difference(values["sampled/sum"], baseline) if against and [run] != against else None
            cells = (steps and steps.total, steps and steps.wall_clock, *map(spread, values.values()), apart)
            rows.append([label, *("-" if cell is None else str(cell) for cell in cells)])
    names = " or ".join(first.labels[name] for name in against)
    header = ["run", "steps in all", "wall-clock steps", *(column.replace("/", " ") for column in columns)]
    header.append(f"sampled sum less {names or 'the baseline'} (95%; seeds ahead)")
    ruler = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ruler, *rows))


def levels(path: Path, results: Sequence[Result]) -> None:
    """The held-out sum of rewards of every run, a dot a seed, its steps beside its label."""
    first = results[0]
    runs = [run for run in first.labels if run in first.runs]
    steps = {run: f" ({at.wall_clock} of {at.total} steps)" for run, at in first.steps.items()}
    figure, panels = _panels(len(KINDS), height=0.8 + 0.22 * len(runs))
    for axes, kind in zip(panels, KINDS, strict=True):
        for place, run in enumerate(runs):
            known = [v for result in results if (v := result.value(run, f"{kind}/sum")) is not None]
            axes.plot(known, [place] * len(known), "o", color="C0", alpha=0.6, markersize=4)
        _name(axes, f"{kind} sum of rewards", "")
        axes.set_yticks(
            range(len(runs)), [first.labels[run] + steps.get(run, "") for run in runs], fontsize=7
        )
        axes.invert_yaxis()
    panels[1].tick_params(labelleft=False)
    _save(figure, panels, path)


def curves(path: Path, results: Sequence[Result]) -> None:
    """Sampled training rewards by step: the trailing mean, with a band of one deviation over seeds."""
    rewards = [reward["name"] for reward in results[0].settings["rewards"]]
    figure, panels = _panels(len(rewards))
    for axes, reward in zip(panels, rewards, strict=True):
        for i, (run, label) in enumerate(results[0].labels.items()):
            name = f"reward/{reward}/mean"
            every = [result.runs.get(run, {}).get("curves", {}).get(name, []) for result in results]
            by_step = [spread(values) for values in zip(*map(smoothed, every), strict=False)]
            known = [(step, value) for step, value in enumerate(by_step, 1) if value is not None]
            if not known:
                continue
            steps = [step for step, _ in known]
            low, high = ([v.mean + sign * v.deviation for _, v in known] for sign in (-1, 1))
            axes.plot(steps, [value.mean for _, value in known], color=f"C{i % 10}", label=label)
            axes.fill_between(steps, low, high, color=f"C{i % 10}", alpha=0.15, linewidth=0)
        _name(axes, "step", f"sampled {reward}, mean")
    _save(figure, panels, path)


def smoothed(values: Sequence[float | None]) -> list[float | None]:
    """The mean of the last `WINDOW` steps that have a value."""
    windows = (values[max(0, at - WINDOW) : at] for at in range(1, len(values) + 1))
    known = ([value for value in window if value is not None] for window in windows)
    return [statistics.fmean(window) if window else None for window in known]


def _panels(n: int, height: float = 3.6) -> tuple[Any, list[Any]]:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, n, figsize=(4.4 * n, height), squeeze=False, layout="constrained")
    return figure, list(axes[0])


def _name(axes: Any, x: str, y: str) -> None:
    axes.set(xlabel=x, ylabel=y)
    axes.grid(alpha=0.2)


def _save(figure: Any, panels: Sequence[Any], path: Path) -> None:
    from matplotlib import pyplot

    handles, labels = panels[0].get_legend_handles_labels()
    if labels:
        figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=7, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=PIXELS, metadata={"Software": None})  # the same numbers, the same file
    pyplot.close(figure)
