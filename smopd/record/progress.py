"""A run's progress: one live line on a terminal, or else about ten plain lines.

A line shows each `reward/NAME/mean`, the latest value of each `greedy/NAME`, and the metrics in FIELDS.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import IO, Any, cast

from rich import progress as bars
from rich.console import Console
from rich.table import Column

from smopd.engine.process import discard, tell
from smopd.names import printable

PLAIN_LINES = 10  # ours: an approximate number
PACE_SECONDS = 60.0  # ours: the time left is extrapolated from the last minute
FIELDS = {
    "nll": ("nll", ".3f"),
    "kl": ("kl", ".3f"),
    "teacher_mass": ("mass", ".2f"),
    "kl_ref": ("kl_ref", ".3f"),
    "grad_norm": ("grad", ".2f"),
    "response/tokens": ("length", ".0f"),
    "tokens_per_second": ("tok/s", ",.0f"),
    "memory/peak_gib": ("GiB", ".1f"),
}
"""Metric -> its name and format on the line."""


class _Output:
    """Standard output that may fail during a run: if it is closed or full, later output is discarded."""

    def write(self, text: str) -> int:
        return self._tried(sys.stdout.write, text)

    def flush(self) -> None:
        self._tried(sys.stdout.flush)

    def _tried(self, act: Callable[..., int | None], *text: str) -> int:
        try:
            return act(*text) or 0
        except OSError:
            discard(sys.stdout.fileno())
            tell("standard output cannot be written; the run continues, see its metrics.jsonl")
            return 0

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)


@functools.cache
def console() -> Console:
    """Return the console that the live line and all messages share."""
    return Console(highlight=False, file=cast(IO[str], _Output()))


def say(text: str) -> None:
    """Print a message, above the live line if there is one."""
    console().print(printable(text), markup=False, emoji=False, soft_wrap=True)


def say_error(text: str) -> None:
    """Print a message to standard error, or discard it if standard error is closed."""
    try:
        print(printable(text), file=sys.stderr, flush=True)
    except OSError:
        discard(2)


class Progress:
    """A context manager for rank 0 that shows a run's progress. A resumed run has done `start_step` steps."""

    def __init__(self, run_name: str, steps: int, start_step: int = 0) -> None:
        self.run_name, self.steps, self.step = run_name, steps, start_step
        self._every = max(1, math.ceil((steps - start_step) / PLAIN_LINES))
        self._first = start_step + 1
        self._fields: dict[str, str] = {}
        self._live = sys.stdout.isatty() and console().is_terminal and not console().is_dumb_terminal
        one_line = Column(no_wrap=True, overflow="ellipsis", ratio=1)
        self._bars = bars.Progress(
            bars.TextColumn("[bold]{task.description}"),
            bars.BarColumn(12),
            bars.TextColumn("{task.fields[shown]}", markup=False, table_column=one_line),
            console=console(),
            disable=not self._live,
            expand=True,
            refresh_per_second=2,
            speed_estimate_period=PACE_SECONDS,
        )
        self._task = self._bars.add_task(printable(run_name), total=steps, completed=start_step, shown="")

    def __enter__(self) -> Progress:
        self._bars.reset(self._task, completed=self.step, shown=self._text(self._fields))
        self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bars.stop()

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show the metrics of `step`, counted from 1. A live line keeps earlier metrics of the same step."""
        again = step == self.step
        self.step = step
        fresh = _shown(metrics)
        kept = {name: text for name, text in self._fields.items() if again or name.startswith("greedy ")}
        self._fields = kept | fresh
        self._bars.update(self._task, completed=step)
        self._bars.update(self._task, shown=self._text(self._fields))
        if not self._live and (step in (self._first, self.steps) or step % self._every == 0):
            say(f"{self.run_name}  {self._text(fresh if again else self._fields)}")

    def _text(self, fields: dict[str, str]) -> str:
        left = self._bars.tasks[0].time_remaining
        parts = [f"{self.step}/{self.steps}"]
        if left is not None and self.step < self.steps:
            parts.append(f"{timedelta(seconds=round(left))} left")
        parts += [f"{name} {text}" for name, text in sorted(fields.items(), key=_rank)]
        return printable("  ".join(parts))


def _rank(field: tuple[str, str]) -> int:
    """Return the sort key: rewards, greedy evaluations, then FIELDS, which a narrow terminal cuts."""
    last = field[0] in dict(FIELDS.values())
    return 1 if field[0].startswith("greedy ") else 2 if last else 0


def _shown(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of each field by the field's name."""
    fields: dict[str, str] = {}
    for key, value in metrics.items():
        name, form = FIELDS.get(key, ("", ".2f"))
        if key.startswith("reward/") and key.endswith("/mean"):
            name = key.removeprefix("reward/").removesuffix("/mean")
            name = f"reward {name}" if name in dict(FIELDS.values()) else name
        elif key.startswith("greedy/"):
            name = key.replace("/", " ", 1)
        if name and value is not None:
            fields[name] = format(value, form)
    return fields
