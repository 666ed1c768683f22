"""The numbers of finished jobs: one JSON file a job, which tables and figures are made from.

A file has the settings that are not the defaults, the commit and versions. For each run it has the held-out
results (`evaluation`), the training rewards by step (`curves`), means of other metrics over the steps
(`means`) and, after a guarded merge, the chosen candidate. Older files have no curves.
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

from smopd.config.cli import read_settings
from smopd.config.schedule import BASE
from smopd.engine.files import write_atomically
from smopd.record.files import JsonlLog

CURVES = "/mean"
MEANS = ("/zero_variance_groups", "/top_kappa_mass", "kl/negative", "teacher_mass")
DIGITS = 4  # of a value of a curve


class Steps(NamedTuple):
    """Optimizer steps on rollouts: of a run itself, with those of all runs that it needs, and in sequence."""

    own: int
    total: int
    wall_clock: int
    """Steps that have to be taken one after the other; teachers train side by side."""


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
        needed: dict[str, set[str]] = {}
        found: dict[str, Steps] = {}
        for name, run in runs.items():
            direct = _models(run.get("init"))
            if run["stage"] == "merge":
                direct |= {each["model"] for each in _setting(self.settings, run, "teachers")["models"]}
            direct &= set(found)
            needed[name] = direct.union(*(needed[other] for other in direct))
            total = own[name] + sum(own[other] for other in needed[name])
            longest = max((found[other].wall_clock for other in direct), default=0)
            found[name] = Steps(own[name], total, own[name] + longest)
        return found


def read(path: Path) -> Result:
    kept = json.loads(path.read_text())
    seed = int(path.stem.rsplit("_", 1)[1])
    return Result(seed, kept["settings"], kept["runs"], kept["environment"], kept["seconds"])


def keep(folder: Path, path: Path, seconds: float) -> None:
    """Writes the file of a finished job.

    Args:
        folder: the run directory.
        seconds: what the job took.
    Raises:
        FileNotFoundError: a run of the job has no held-out results.
    """
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
    metrics: dict[str, list[float | None]] = {}
    for line in JsonlLog(run / "metrics.jsonl").read():
        for name, value in line.items():
            metrics.setdefault(name, []).append(value)
    curves = {name: values for name, values in metrics.items() if name.startswith("reward/")}
    found["curves"] = {
        name: [None if value is None else round(value, DIGITS) for value in values]
        for name, values in curves.items()
        if name.endswith(CURVES)
    }
    found["means"] = {
        name: statistics.fmean(known)
        for name, values in sorted(metrics.items())
        if name.endswith(MEANS) and (known := [value for value in values if value is not None])
    }
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
