"""The numbers of finished jobs: one JSON file a job, and the tables and figures that are made from them.

A file has the settings that are not the defaults, the commit and versions, and for each run its held-out
results (`evaluation`), each step's mean rewards on training prompts (`curves`) and, after a guarded merge,
the chosen candidate.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from bench.study.experiments import EXPERIMENTS
from smopd.config.cli import read_settings
from smopd.config.schedule import BASE, Steps, count_steps
from smopd.engine.files import write_atomically
from smopd.report.colours import PALETTE, assign

KINDS = ("greedy", "sampled")


@dataclass(frozen=True)
class Result:
    """One job: a recipe's runs of one seed."""

    seed: int
    settings: Mapping[str, Any]
    runs: Mapping[str, Mapping[str, Any]]
    environment: Mapping[str, Any]
    seconds: float

    @property
    def labels(self) -> dict[str, str]:
        """Run -> label, in the recipe's order, the base first."""
        return {BASE: "Base"} | {name: run.get("label", name) for name, run in self.settings["runs"].items()}

    def value(self, run: str, column: str) -> float | None:
        """A column of a run's held-out results, `sampled/sum` say."""
        return self.runs.get(run, {}).get("evaluation", {}).get(column)

    @cached_property
    def steps(self) -> dict[str, Steps]:
        """Of every run, by the settings that the job had."""
        runs: Mapping[str, Any] = self.settings["runs"]
        own = {name: _setting(self.settings, run, "loop")["steps"] for name, run in runs.items()}
        needs = {name: _models(run.get("init")) for name, run in runs.items()}
        for name, run in runs.items():
            if run["stage"] == "merge":
                needs[name] |= {each["model"] for each in _setting(self.settings, run, "teachers")["models"]}
        return count_steps(own, needs)

    @property
    def colours(self) -> dict[str, str]:
        """Of every run, as in the report."""
        kinds = {}
        for name, run in self.settings["runs"].items():
            merges = run["stage"] == "merge"
            method = _setting(self.settings, run, "merge").get("method", "weights")
            kinds[name] = method if merges else run["stage"]
        return {BASE: "black"} | {name: PALETTE[colour] for name, colour in assign(kinds).items()}


def read(path: Path) -> Result:
    kept = json.loads(path.read_text())
    seed = int(path.stem.rsplit("_", 1)[1])
    return Result(seed, kept["settings"], kept["runs"], kept["environment"], kept["seconds"])


def keep(folder: Path, path: Path, seconds: float) -> None:
    """Writes the file of a finished job from its run directory; seconds: what the job took."""
    settings = read_settings(str(folder / "config.yaml"))
    there = json.loads((folder / "environment.json").read_text())
    text = {
        "seconds": round(seconds, 1),
        "environment": {key: there.get(key) for key in ("git", "python", "packages", "cpus")},
        "settings": settings.model_dump(mode="json", exclude_defaults=True, exclude={"output"}),
        "runs": {run: _numbers(folder / run) for run in (BASE, *settings.runs)},
    }
    text["settings"].setdefault("loop", {})["steps"] = settings.loop.steps
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(text, indent=1) + "\n").encode())


def _numbers(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"evaluation": json.loads((run / "evaluation.json").read_text())}
    if (steps := run / "metrics.jsonl").exists():
        rows = [json.loads(line) for line in steps.read_text().splitlines()]
        names = (
            [name for name in rows[0] if name.startswith("reward/") and name.endswith("/mean")]
            if rows
            else []
        )
        found["curves"] = {name: [round(row[name], 3) for row in rows] for name in names}
    if (run / "merge.json").exists():
        found["chosen"] = json.loads((run / "merge.json").read_text())["chosen"]
    return found


def _setting(settings: Mapping[str, Any], run: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {**settings.get(name, {}), **run.get("set", {}).get(name, {})}


def _models(init: Any) -> set[str]:
    """The models that a run's first weights are made of."""
    if init is None or isinstance(init, str):
        return {init or BASE}
    return {each["model"] for each in init["merge"]["models"]}


class Spread(NamedTuple):
    """The mean over seeds and the standard deviation of a seed (n - 1)."""

    mean: float
    deviation: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.3f}" + (f" ± {self.deviation:.3f}" if self.n > 1 else "")


T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t for 1 to 9 degrees of freedom: 2.5% lie above."""


class Difference(NamedTuple):
    """Two runs compared seed by seed: the mean, half its 95% confidence interval, seeds ahead and equal."""

    mean: float
    reach: float
    ahead: int
    equal: int
    n: int

    def __str__(self) -> str:
        interval = f" ± {self.reach:.3f}" if math.isfinite(self.reach) else ""
        equal = f", {self.equal} equal" if self.equal else ""
        return f"{self.mean:+.3f}{interval} ({self.ahead} of {self.n}{equal})"


def spread(values: Sequence[float | None]) -> Spread | None:
    """Of the seeds that have a value; None where none has."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return None
    deviation = statistics.stdev(known) if len(known) > 1 else 0.0
    return Spread(statistics.fmean(known), deviation, len(known))


def difference(these: Sequence[float | None], those: Sequence[float | None]) -> Difference | None:
    """Of the seeds in which both have a value; one seed has no interval, and neither have more than ten."""
    apart = [a - b for a, b in zip(these, those, strict=True) if a is not None and b is not None]
    if (found := spread(apart)) is None:
        return None
    known = 1 < found.n <= len(T_975) + 1
    reach = T_975[found.n - 2] * found.deviation / math.sqrt(found.n) if known else math.inf
    ahead, equal = sum(value > 0 for value in apart), sum(value == 0 for value in apart)
    return Difference(found.mean, reach, ahead, equal, found.n)


def best(*candidates: Sequence[float | None]) -> list[float | None]:
    """The highest of several, seed by seed; None where one is absent."""
    rows = zip(*candidates, strict=True)
    return [None if None in row else max(value for value in row if value is not None) for row in rows]


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
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    first = results[0]
    runs = [run for run in first.labels if run in first.runs]
    steps = {run: f" ({at.wall_clock} of {at.total} steps)" for run, at in first.steps.items()}
    size = (4.4 * len(KINDS), 0.8 + 0.22 * len(runs))
    figure, panels = pyplot.subplots(1, len(KINDS), figsize=size, sharey=True, layout="constrained")
    for axes, kind in zip(panels, KINDS, strict=True):
        for place, run in enumerate(runs):
            known = [v for result in results if (v := result.value(run, f"{kind}/sum")) is not None]
            axes.plot(known, [place] * len(known), "o", color=first.colours[run], alpha=0.6, markersize=4)
        axes.set_xlabel(f"{kind} sum of rewards")
        axes.grid(alpha=0.2)
    labels = [first.labels[run] + steps.get(run, "") for run in runs]
    panels[0].set_yticks(range(len(runs)), labels, fontsize=7)
    panels[0].invert_yaxis()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})  # the same numbers, the same file
    pyplot.close(figure)
