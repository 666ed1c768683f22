"""Line charts of the runs, as data from which page.html draws inline SVG."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, combinations
from typing import Any

from smopd.report.tables import heading

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 460, 250, 52, 12, 10, 40
_POINTS = 200  # approximate limit per line
_SMOOTHED = 20  # a point of an overview curve averages 1/20 of all steps
_PLANES = 3  # maximum number of charts of one reward against another

Lines = Sequence[Mapping[str, Any]]
"""The lines of one of a run's .jsonl files."""
Points = Sequence[tuple[float, float]]

_SECTIONS = {
    "Rewards of the sampled responses": {"reward/(.*)/mean": "{}"},
    "Held-out prompts, greedy": {"greedy/([^/]*)": "{}"},
    "Distillation": {
        "kl": "KL to the teachers' target (nats)",
        "reverse_kl": "reverse KL to the mixture (nats)",
        "teacher_mass": "the target's probability of its tokens",
        "student_mass": "the student's probability of the target's tokens",
        "teacher_(.*)/top_kappa_mass": "{}: probability of its top tokens",
        "opd_coef": "lambda",
    },
    "Policy": {
        "entropy": "entropy (nats)",
        "grad_norm": "norm of the gradient",
        "response/tokens": "length of a response (tokens)",
        "response/truncated": "share of responses cut at the limit",
        "rollout_mismatch": "trainer and rollout engine differ by (nats)",
        "kl_ref": "KL to the initial policy (nats)",
    },
    "Conversations": {
        "conversation/turns": "turns of the policy",
        "conversation/environment_tokens": "tokens of the environment",
        "conversation/drift": "share whose chat template drifts",
        "conversation/ended/(.*)": "ended by {} (share)",
    },
    "Groups whose responses all earned the same": {
        "reward/(.*)/zero_variance_groups": "{} (share of groups)"
    },
    "Seconds per step": {"seconds/(.*)": "{} (seconds)"},
}
"""Title -> regular expression of metrics -> title of the chart, where {} is the text of the group."""


def overview(
    metrics: Mapping[str, Lines], rewards: Sequence[str], begins: Mapping[str, int], time: str
) -> Iterator[dict[str, Any]]:
    """Yield charts of one reward against another, and a chart of the sum of rewards over time.

    `begins` maps a run to the wall-clock step at which it starts, after the runs that it needs. `time` is
    the title of the axis with the wall-clock steps.
    """
    keys = [f"reward/{name}/mean" for name in rewards]
    curves = {run: rows for run, lines in metrics.items() if (rows := smoothed(lines, keys))}
    for (i, right), (j, up) in [*combinations(enumerate(map(heading, rewards), 1), 2)][:_PLANES]:
        plane = {run: [(row[i], row[j]) for row in rows] for run, rows in curves.items()}
        yield from chart(f"{up} (up) against {right} (right)", right, plane, ends=True)
    total = {run: [(r[0] + begins.get(run, 0), sum(r[1:])) for r in rows] for run, rows in curves.items()}
    yield from chart("Sum of the rewards", time, total, marks={*begins.values()} - {0})


def smoothed(lines: Lines, keys: Sequence[str]) -> list[tuple[float, ...]]:
    """Return one row per step: its number, and each metric's mean over the latest 1/20 of all steps."""
    whole = (line for line in lines if all(_finite(line, key) for key in keys))
    rows = [(line["step"], *(line[key] for key in keys)) for line in whole]
    window = math.ceil(len(rows) / _SMOOTHED)
    sums = [[*accumulate((row[k] for row in rows), initial=0.0)] for k in range(1, len(keys) + 1)]
    return [
        (row[0], *((total[n] - total[max(0, n - window)]) / min(n, window) for total in sums))
        for n, row in enumerate(rows, 1)
    ]


def sections(
    metrics: Mapping[str, Lines], begins: Mapping[str, int], time: str, teachers: Sequence[str]
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the title and charts of each section that is not empty. `teachers` are the teachers' labels."""
    keys = dict.fromkeys(key for lines in metrics.values() for line in lines for key in line)
    if "kl" not in keys:  # no run has teachers: lambda is 0
        keys.pop("opd_coef", None)
        if "kl_ref" not in keys:  # this phase also scores the reference policy
            keys.pop("seconds/teachers", None)
    for title, patterns in _SECTIONS.items():
        charts = []
        for pattern, name in patterns.items():
            for match in filter(None, (re.fullmatch(pattern, key) for key in keys)):
                of = "".join(match.groups())
                of = dict(enumerate(teachers)).get(int(of), of) if name.startswith("{}:") else of
                curves = {run: _points(lines, match[0], begins.get(run, 0)) for run, lines in metrics.items()}
                charts += chart(heading(name.replace("{}", of)), time, curves)
        if charts:
            yield title, charts


def chart(
    title: str, x_title: str, curves: Mapping[str, Points], *, ends: bool = False, marks: Iterable[int] = ()
) -> list[dict[str, Any]]:
    """Return [chart], or [] if there are no points. `ends` draws dots at both ends of each curve."""
    points = [point for each in curves.values() for point in each]
    if not points:
        return []
    x_values, y_values = zip(*points, strict=True)
    x_ticks, x = scale(x_values, _LEFT, _WIDTH - _RIGHT)
    y_ticks, y = scale(y_values, _HEIGHT - _BOTTOM, _TOP)
    frame = {"size": (_WIDTH, _HEIGHT), "box": (_LEFT, _TOP, _WIDTH - _RIGHT, _HEIGHT - _BOTTOM)}
    shown = {run: each for run, each in curves.items() if each}
    texts = {"title": title, "x_title": x_title, "x_ticks": x_ticks, "y_ticks": y_ticks}
    lines = {"x": x, "y": y, "curves": shown, "marks": sorted(marks), "ends": ends}
    return [{**frame, **texts, **lines}]


def scale(values: Sequence[float], begin: float, end: float) -> tuple[list[float], Callable[[float], float]]:
    """Return ticks that enclose the values, and the linear map of the ticks' range to `begin`..`end`."""
    found = ticks(min(values), max(values))
    unit = (end - begin) / (found[-1] - found[0])
    return found, lambda value: round(begin + unit * (value - found[0]), 1)


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return about `most` round values that enclose `low` and `high`."""
    least = max(1e-9 * max(abs(low), abs(high)), 1e-300)  # a smaller span is a rounding error
    span = high - low if high - low > least else max(abs(high), 1e-3)
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power * most >= span * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, max(last, first + 1) + 1)]


def _points(lines: Lines, key: str, begin: int) -> list[tuple[float, float]]:
    """Return (step, value) of about _POINTS finite values, including the last."""
    points = [(begin + line["step"], float(line[key])) for line in lines if _finite(line, key)]
    every = math.ceil(len(points) / _POINTS) or 1
    return points[::every] + points[len(points) - 1 :] if every > 1 else points


def _finite(line: Mapping[str, Any], key: str) -> bool:
    return isinstance(line.get(key), int | float) and math.isfinite(line[key])
