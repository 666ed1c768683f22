"""Numbers out of finished runs: final rewards, curves, take-off, all over seeds."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from smopd.record.files import JsonlLog


class Spread(NamedTuple):
    """A mean with the standard deviation over seeds, and how many there were."""

    mean: float
    deviation: float
    n: int

    def __str__(self) -> str:
        return f"{self:}"

    def __format__(self, sign: str) -> str:
        """Three digits, with the deviation where there is one; `+` shows the sign."""
        return f"{self.mean:{sign}.3f}" + (f" ± {self.deviation:.3f}" if self.n > 1 else "")


def spread(values: Sequence[float | None]) -> Spread | None:
    """None where no seed has a value."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return None
    deviation = statistics.stdev(known) if len(known) > 1 else 0.0
    return Spread(statistics.fmean(known), deviation, len(known))


def finals(folders: Sequence[Path], run: str, column: str) -> list[float | None]:
    """A column of the runs' held-out evaluation, `greedy/format` say, by seed."""
    return [evaluation(folder / run).get(column) for folder in folders]


def final(folders: Sequence[Path], run: str, column: str) -> Spread | None:
    """The same over the seeds."""
    return spread(finals(folders, run, column))


def curve(folders: Sequence[Path], run: str, metric: str, window: int = 1) -> list[tuple[int, Spread]]:
    """A training metric by step, over the seeds that have it, as a trailing mean of `window` steps."""
    per_seed = [_smoothed(steps(folder / run, metric), window) for folder in folders]
    every = sorted({step for values in per_seed for step in values})
    found = [(step, spread([values.get(step) for values in per_seed])) for step in every]
    return [(step, at) for step, at in found if at is not None]


def take_off(folder: Path, run: str, metric: str, level: float = 0.5) -> int | None:
    """The first step at which a metric is at least `level`; None where it never is."""
    return next((step for step, value in steps(folder / run, metric).items() if value >= level), None)


def steps(run: Path, metric: str) -> dict[int, float]:
    """A metric of one run by step."""
    return {int(line["step"]): float(line[metric]) for line in _lines(run) if line.get(metric) is not None}


def means(run: Path, ending: str) -> dict[str, float]:
    """The mean over the steps of every metric whose name ends so."""
    names = {name for line in _lines(run) for name in line if name.endswith(ending)}
    return {name: mean for name in sorted(names) if (mean := mean_of(run, name)) is not None}


def mean_of(run: Path, metric: str, begin: int = 0) -> float | None:
    """The mean of a metric from step `begin` on."""
    values = [value for step, value in steps(run, metric).items() if step >= begin]
    return statistics.fmean(values) if values else None


def seconds(folder: Path) -> float:
    """What a job took."""
    return float((folder / "study_seconds.txt").read_text())


def cores(folder: Path) -> int | None:
    """Of the machine that a job was run on."""
    return environment(folder).get("cpus")


def commit(folder: Path) -> str:
    """The commit that a job was run at."""
    git = environment(folder).get("git")
    return f"{git['commit'][:10]}{', modified' if git['modified'] else ''}" if git else "unrecorded"


def environment(folder: Path) -> dict[str, Any]:
    """Commit, versions and machine of a job."""
    path = folder / "environment.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _smoothed(values: dict[int, float], window: int) -> dict[int, float]:
    ordered = sorted(values)
    return {
        step: statistics.fmean(values[other] for other in ordered[max(0, i + 1 - window) : i + 1])
        for i, step in enumerate(ordered)
    }


@cache
def _lines(run: Path) -> tuple[dict[str, Any], ...]:
    return tuple(JsonlLog(run / "metrics.jsonl").read())


@cache
def evaluation(run: Path) -> dict[str, Any]:
    """The held-out results of one run, empty where there are none."""
    path = run / "evaluation.json"
    return json.loads(path.read_text()) if path.exists() else {}
