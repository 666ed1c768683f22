"""Line charts of the runs as inline SVG: one chart per metric, one color per run."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

COLOURS = 10
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 420, 180, 48, 10, 22
_POINTS = 200  # at most about, per line

Lines = Sequence[Mapping[str, Any]]
"""Lines of a .jsonl file of a run."""

_SECTIONS = {
    "rewards, mean of each step's rollouts": "reward/*/mean",
    "held-out prompts, greedy": "greedy/*",
    "distillation": (
        "kl reverse_kl teacher_mass student_mass teacher_*/top_kappa_mass teacher_*/change opd_coef"
    ),
    "policy": "entropy grad_norm response/tokens/mean response/truncated rollout_mismatch kl_ref",
    "groups whose rollouts all got the same reward": "reward/*/zero_variance_groups",
}
"""Title -> patterns of metric names."""


def colour(i: int) -> str:
    """Return the CSS class of run or teacher `i`."""
    return f"c{i % COLOURS}"


def sections(metrics: Mapping[str, Lines]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return title and figures of each section that is not empty."""
    colours = {run: colour(i) for i, run in enumerate(metrics)}
    keys = list(dict.fromkeys(key for lines in metrics.values() for line in lines for key in line))
    found = []
    for title, patterns in _SECTIONS.items():
        expressions = [pattern.replace("*", "[^/]*") for pattern in patterns.split()]
        chosen = [key for expression in expressions for key in keys if re.fullmatch(expression, key)]
        if figures := [drawn for key in chosen if (drawn := figure(key, metrics, colours))]:
            found.append((title, figures))
    return found


def figure(key: str, metrics: Mapping[str, Lines], colours: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the SVG content of one metric over all runs; None without a finite value."""
    lines = {run: points for run, rows in metrics.items() if (points := _points(rows, key))}
    everything = [point for points in lines.values() for point in points]
    if not everything:
        return None
    first, last = min(step for step, _ in everything), max(step for step, _ in everything)
    low, high = min(value for _, value in everything), max(value for _, value in everything)
    width, height = _WIDTH - _LEFT - 8, _HEIGHT - _TOP - _BOTTOM

    def x(step: int) -> float:
        return _LEFT + width * (step - first) / max(last - first, 1)

    def y(value: float) -> float:
        return _TOP + height * (1 - (value - low) / (high - low or 1.0))

    ticks = [
        (_LEFT - 4, round(y(low)), "end", f"{low:.3g}"),
        (_LEFT, _HEIGHT - 6, "start", str(first)),
        (_LEFT + width, _HEIGHT - 6, "end", f"step {last}"),
    ]
    if high > low:
        ticks.append((_LEFT - 4, round(y(high)) + 6, "end", f"{high:.3g}"))
    return {
        "key": key,
        "width": _WIDTH,
        "height": _HEIGHT,
        "axis": f"M{_LEFT} {_TOP}V{_TOP + height}H{_LEFT + width}",
        "ticks": ticks,
        "lines": [
            {
                "colour": colours[run],
                "points": " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points),
                "title": f"{run}: {points[-1][1]:.4g} at step {points[-1][0]}",
            }
            for run, points in lines.items()
        ],
    }


def _points(lines: Lines, key: str) -> list[tuple[int, float]]:
    """Return (step, value) of about _POINTS finite values, including the last."""
    points = [(line["step"], line[key]) for line in lines if isinstance(line.get(key), int | float)]
    points = [(step, float(value)) for step, value in points if math.isfinite(value)]
    every = math.ceil(len(points) / _POINTS) or 1
    return points[::every] + points[len(points) - 1 :] if every > 1 else points
