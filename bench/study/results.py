"""The results of finished jobs, one JSON file per job, and the tables and figures made from them.

A file has the settings that differ from the defaults, the commit and the versions. For each run it has the
held-out results (`evaluation`), each step's mean rewards on training prompts (`curves`) and, after a guarded
merge, the chosen candidate.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from bench.study.experiments import EXPERIMENTS
from smopd.config.cli import read_settings
from smopd.config.schedule import BASE, Steps, count_steps
from smopd.config.settings import Loop, RolloutSettings, Settings
from smopd.engine.files import write_atomically
from smopd.merging.guard import alone, levels
from smopd.report.tables import PALETTE, assign

KINDS = ("greedy", "sampled")


@dataclass(frozen=True)
class Result:
    """The result of one job: the runs of a recipe with one seed."""

    experiment: str
    seed: int
    settings: Mapping[str, Any]
    runs: Mapping[str, Mapping[str, Any]]

    @cached_property
    def labels(self) -> dict[str, str]:
        """Run -> its label in the current recipe. The base comes first, then the recipe's order."""
        return {BASE: "Base"} | {name: run.label or name for name, run in self._recipe.runs.items()}

    @cached_property
    def _recipe(self) -> Settings:
        return read_settings(str(EXPERIMENTS[self.experiment].path))

    def value(self, run: str, column: str) -> float | None:
        """Return a column of a run's held-out results, such as `sampled/sum`."""
        return self.runs.get(run, {}).get("evaluation", {}).get(column)

    @cached_property
    def steps(self) -> dict[str, Steps]:
        """Return the steps of every run, computed from the settings of the job.

        Totals count rollouts, in units of a step with the recipe's smallest batch. A step with twice the
        prompts counts as two. A guard's candidate with as many rollouts as a step counts as one.
        """
        runs: Mapping[str, Any] = self.settings["runs"]
        group = self.settings.get("rollout", {}).get("group_size", RolloutSettings().group_size)
        loops = {name: vars(Loop(**_setting(self.settings, run, "loop"))) for name, run in runs.items()}
        unit = min(loop["prompts_per_step"] for loop in loops.values()) * group
        own = {name: loop["steps"] for name, loop in loops.items()}
        sampled = {name: steps * loops[name]["prompts_per_step"] * group for name, steps in own.items()}
        scaled = {name: math.ceil((sampled[name] + self._guard_rollouts(name)) / unit) for name in runs}
        needs = {name: _models(run.get("init")) for name, run in runs.items()}
        for name, run in runs.items():
            if run["stage"] == "merge":
                needs[name] |= {each["model"] for each in _setting(self.settings, run, "teachers")["models"]}
        totals = count_steps(scaled, needs)
        return {
            name: each._replace(total=totals[name].total) for name, each in count_steps(own, needs).items()
        }

    def _guard_rollouts(self, run: str) -> int:
        """Return the number of rollouts of a run's guard, up to the level of the chosen candidate."""
        if (chosen := self.runs.get(run, {}).get("chosen")) is None:
            return 0
        merge = self._recipe.resolved(run).merge
        tried = len(alone(merge))
        for level in levels(merge):
            tried += len(level)
            if chosen in {name for each in level for name in (each.name, _old_name(each.name))}:
                break
        return tried * merge.guard.prompts * merge.guard.samples if merge.guard else 0

    @property
    def colours(self) -> dict[str, str]:
        """The color of every run, as in the report."""
        kinds = {}
        for name, run in self.settings["runs"].items():
            kinds[name] = run["stage"]
            if run["stage"] == "merge":
                kinds[name] = _setting(self.settings, run, "merge").get("method", "weights")
            elif run["stage"] == "train" and _models(run.get("init")) == {BASE}:
                kinds[name] += f" {_setting(self.settings, run, 'advantage').get('estimator', 'gdpo')}"
        return {BASE: "black"} | {name: PALETTE[colour] for name, colour in assign(kinds).items()}


def read(path: Path) -> Result:
    kept = json.loads(path.read_text())
    experiment = max((name for name in EXPERIMENTS if path.stem.startswith(f"{name}_")), key=len)
    seed = int(path.stem.rsplit("_", 1)[1])
    return Result(experiment, seed, kept["settings"], kept["runs"])


def keep(folder: Path, path: Path, seconds: float) -> None:
    """Write the file of a finished job from its run directory. `seconds` is the job's duration."""
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
    lines = re.sub(r"\[[^][{}]*\]", lambda numbers: " ".join(numbers[0].split()), json.dumps(text, indent=1))
    write_atomically(path, f"{lines}\n".encode())


def _numbers(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"evaluation": json.loads((run / "evaluation.json").read_text())}
    if (steps := run / "metrics.jsonl").exists():
        rows = [json.loads(line) for line in steps.read_text().splitlines()]
        names = [name for row in rows[:1] for name in row if re.fullmatch("reward/.*/mean", name)]
        found["curves"] = {name: [round(row[name], 3) for row in rows] for name in names}
    if (run / "merge.json").exists():
        found["chosen"] = json.loads((run / "merge.json").read_text())["chosen"]
    return found


def _setting(settings: Mapping[str, Any], run: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {**settings.get(name, {}), **run.get("set", {}).get(name, {})}


def _old_name(candidate: str) -> str:
    """Return the name of a candidate in the results of older commits."""
    return re.sub(r" \(keep ([\d.]+)\)", r" \1", candidate)


def _models(init: Any) -> set[str]:
    """Return the models from which a run's first weights are made."""
    if init is None or isinstance(init, str):
        return {init or BASE}
    return {each["model"] for each in init["merge"]["models"]}


class Spread(NamedTuple):
    """The mean and the standard deviation (n - 1) over seeds."""

    mean: float
    deviation: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.3f}" + (f" ± {self.deviation:.3f}" if self.n > 1 else "")


T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""The 97.5% quantiles of Student's t for 1 to 9 degrees of freedom."""


class Difference(NamedTuple):
    """Two runs compared seed by seed: mean, half of its 95% confidence interval, seeds ahead and equal."""

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
    """Return the spread over the seeds that have a value, or None if no seed has one."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return None
    deviation = statistics.stdev(known) if len(known) > 1 else 0.0
    return Spread(statistics.fmean(known), deviation, len(known))


def difference(these: Sequence[float | None], those: Sequence[float | None]) -> Difference | None:
    """Compare the seeds in which both runs have a value. Only 2 to 10 seeds have a finite interval."""
    apart = [a - b for a, b in zip(these, those, strict=True) if a is not None and b is not None]
    if (found := spread(apart)) is None:
        return None
    known = 1 < found.n <= len(T_975) + 1
    reach = T_975[found.n - 2] * found.deviation / math.sqrt(found.n) if known else math.inf
    ahead, equal = sum(value > 0 for value in apart), sum(value == 0 for value in apart)
    return Difference(found.mean, reach, ahead, equal, found.n)


COLUMNS: dict[str, str] = {
    "steps": "total steps",
    "wall_clock": "wall-clock steps",
    "difference": "sampled sum, difference (95%; seeds ahead)",
}
"""Column -> heading. A table also has columns of rewards, `greedy/NAME` and `sampled/NAME`."""


def table(
    results: Sequence[Result], baseline: str, runs: Sequence[str] = (), columns: Sequence[str] = ()
) -> str:
    """Return a Markdown table with one row per run.

    Args:
        results: one per seed.
        baseline: the run that `difference` subtracts, seed by seed.
        runs: the runs to show. If empty, all.
        columns: keys of `COLUMNS`, or held-out rewards. If empty, all.
    """
    first = results[0]
    rewards = [*(reward["name"] for reward in first.settings["rewards"]), "sum"]
    columns = columns or (
        "steps",
        "wall_clock",
        *(f"{kind}/{reward}" for kind in KINDS for reward in rewards),
        "difference",
    )
    header = ["run", *(COLUMNS.get(column, column.replace("/", " ")) for column in columns)]
    rows = [
        [first.labels[run], *(_cell(results, baseline, run, column) for column in columns)]
        for run in (runs or first.labels)
        if run in first.runs
    ]
    ruler = ["---"] + ["---:"] * len(columns)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ruler, *rows))


def _cell(results: Sequence[Result], baseline: str, run: str, column: str) -> str:
    found: object
    if column in ("steps", "wall_clock"):
        steps = [result.steps[run] for result in results if run in result.steps]
        column = "total" if column == "steps" else column
        found = round(statistics.fmean(getattr(each, column) for each in steps)) if steps else None
    elif column == "difference":
        sums = [[result.value(name, "sampled/sum") for result in results] for name in (run, baseline)]
        found = difference(*sums) if run != baseline else None
    else:
        found = spread([result.value(run, column) for result in results])
    return "-" if found is None else str(found)


def first_step(result: Result, run: str, reward: str, level: float = 0.5) -> int | None:
    """Return the first step, counted from 1, whose mean `reward` on training prompts is above `level`."""
    curve = result.runs[run]["curves"][f"reward/{reward}/mean"]
    return next((step + 1 for step, value in enumerate(curve) if value > level), None)


def across(by_variant: Mapping[str, Sequence[Result]], column: str) -> str:
    """Return a Markdown table with one row per run and one column per variant.

    Args:
        column: a held-out reward, such as `sampled/sum`. `found/REWARD` means in how many seeds the run finds
            the reward in training, and the median of its first step.
    """
    first = next(iter(by_variant.values()))[0]
    runs = [run for run in first.labels if "curves" in first.runs.get(run, {}) and run != BASE]
    lines = [["run", *by_variant], ["---"] + ["---:"] * len(by_variant)]
    for run in runs:
        cells = [
            _found(results, run, column.removeprefix("found/"))
            if column.startswith("found/")
            else str(spread([result.value(run, column) for result in results]))
            for results in by_variant.values()
        ]
        lines.append([first.labels[run], *cells])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _found(results: Sequence[Result], run: str, reward: str) -> str:
    steps = [first_step(result, run, reward) for result in results]
    found = [step for step in steps if step is not None]
    return f"{len(found)} of {len(steps)}" + (f", step {statistics.median_low(found)}" if found else "")


def figure(path: Path, results: Sequence[Result], runs: Sequence[str], rewards: tuple[str, str]) -> None:
    """Draw held-out sampled rewards, one dot per seed, and the mean training sum by total steps."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    drawn, (plane, curves) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    first = results[0]
    for run in runs:
        color, label = first.colours[run], first.labels[run]
        points = [[result.value(run, f"sampled/{reward}") for result in results] for reward in rewards]
        plane.plot(*points, "o", color=color, alpha=0.7, markersize=6, label=label)
        if steps := first.steps.get(run):
            sums = [_sums(result, run, rewards) for result in results]
            means = [statistics.fmean(values) for values in zip(*sums, strict=True)]
            curves.plot(range(steps.total - steps.own + 1, steps.total + 1), means, color=color, label=label)
    plane.set(xlabel=f"{rewards[0]}, sampled", ylabel=f"{rewards[1]}, sampled")
    curves.set(xlabel="total steps, teachers included", ylabel=f"{rewards[0]} + {rewards[1]} in training")
    plane.legend(fontsize=8, frameon=False, loc="center right")
    for axes in (plane, curves):
        axes.grid(alpha=0.2)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(path, dpi=130, metadata={"Software": None})  # the same numbers give the same file
    pyplot.close(drawn)


def _sums(result: Result, run: str, rewards: tuple[str, str]) -> list[float]:
    curves = result.runs[run]["curves"]
    return [sum(pair) for pair in zip(*(curves[f"reward/{name}/mean"] for name in rewards), strict=True)]


def found_map(path: Path, cells: Mapping[tuple[str, str], Sequence[Result]], runs: Sequence[str]) -> None:
    """Draw, for each run, the share of seeds that find the format in training.

    Args:
        cells: (row, column) of the map -> its results. A cell without results stays blank.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    rows, columns = (list(dict.fromkeys(key[axis] for key in cells)) for axis in (0, 1))
    labels = next((found[0].labels for found in cells.values() if found), {})
    drawn, panels = pyplot.subplots(
        1, len(runs), figsize=(3.6 * len(runs), 2.4), layout="constrained", sharey=True
    )
    for panel, run in zip(panels, runs, strict=True):
        shares = [[math.nan] * len(columns) for _ in rows]
        for (row, column), results in cells.items():
            if results:
                y, x = rows.index(row), columns.index(column)
                steps = [first_step(result, run, "format") for result in results]
                shares[y][x] = sum(step is not None for step in steps) / len(steps)
                panel.text(
                    x, y, f"{len(steps) - steps.count(None)} of {len(steps)}", ha="center", va="center"
                )
        panel.imshow(shares, cmap="YlGn", vmin=0, vmax=1.3, aspect="auto")
        panel.set_title(labels.get(run, run))
        panel.set_xticks(range(len(columns)), columns)
        panel.set_yticks(range(len(rows)), rows)
    panels[0].set_ylabel("demonstrations\nwith the format")
    drawn.savefig(path, dpi=130, metadata={"Software": None})
    pyplot.close(drawn)
