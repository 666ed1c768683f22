"""What a run says while it goes: one live line on a terminal, a few plain lines elsewhere.

Metric keys that are shown, where present:

    reward/NAME/mean    mean reward of the step's responses, each dimension
    nll                 of a supervised step, nats a token
    greedy/NAME         the last greedy evaluation, kept on the line until the next
    kl                  nats a token
    teacher_mass        probability mass of the teachers' kept target
    tokens_per_second
"""

from __future__ import annotations

import functools
import math
import sys
import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from smopd.names import printable

_PLAIN_LINES = 10
_PACE_STEPS = 10
_BAR_WIDTH = 12


@functools.cache
def console() -> Console:
    """The console that the live line and all messages share."""
    return Console(highlight=False)


def say(text: str) -> None:
    """Prints a message; above the live line where there is one."""
    console().print(printable(text), markup=False, soft_wrap=True)


class Progress:
    """Shows how a run goes; for rank 0 alone.

    Args:
        run_name: what the line begins with.
        steps: of the whole run.
        start_step: steps already done, where a run is resumed.
        plain: lines even on a terminal; None or False is a live line where the output is a terminal.
    """

    def __init__(self, run_name: str, steps: int, start_step: int = 0, plain: bool | None = None) -> None:
        self.run_name, self.steps, self.step = run_name, steps, start_step
        self._every = max(1, math.ceil((steps - start_step) / _PLAIN_LINES))
        self._first = start_step + 1
        self._fields: dict[str, str] = {}
        self._times: deque[tuple[float, int]] = deque([(time.monotonic(), start_step)], _PACE_STEPS + 1)
        alive = sys.stdout.isatty() and console().is_terminal and not console().is_dumb_terminal
        self._live: Live | None = None
        if alive and not plain:
            self._live = Live(console=console(), get_renderable=self._line, refresh_per_second=2)

    def __enter__(self) -> Progress:
        self._times = deque([(time.monotonic(), self.step)], _PACE_STEPS + 1)
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Step `step` (counted from 1) is done; more of the same step (an evaluation) joins its line.

        Missing keys, NaN and values that are no numbers are fine.
        """
        again = step == self.step
        self.step = step
        fresh = _shown(metrics) | _shown(metrics, greedy=True)
        kept = {name: text for name, text in self._fields.items() if again or name.startswith("greedy ")}
        self._fields = {**{name: fresh.get(name, text) for name, text in kept.items()}, **fresh}
        if not again:
            self._times.append((time.monotonic(), step))
        if self._live is None and (step in (self._first, self.steps) or step % self._every == 0):
            say(f"{self.run_name}  {self._text(fresh if again else self._fields)}")

    def say(self, text: str) -> None:
        """A message, above the live line where there is one."""
        say(text)

    def seconds_left(self) -> float | None:
        """At the pace of the last steps; None before the first one."""
        (begin, first), (end, last) = self._times[0], self._times[-1]
        return None if last <= first else (end - begin) / (last - first) * (self.steps - self.step)

    def _text(self, fields: dict[str, str]) -> str:
        parts = [f"{self.step}/{self.steps}"]
        left = self.seconds_left()
        if left is not None and self.step < self.steps:
            parts.append(f"{_clock(left)} left")
        parts += [f"{name} {text}" for name, text in sorted(fields.items(), key=_rank)]
        return printable("  ".join(parts))

    def _line(self) -> RenderableType:
        done = round(_BAR_WIDTH * self.step / max(self.steps, 1))
        return Text.assemble(
            (f"{self.run_name} ", "bold"),
            ("━" * done, "green"),
            ("━" * (_BAR_WIDTH - done), "dim"),
            f" {self._text(self._fields)}",
            no_wrap=True,
            overflow="ellipsis",
        )


def _rank(field: tuple[str, str]) -> int:
    """Rewards first, then greedy evaluations, then the rest, which a narrow terminal may lose."""
    return 1 if field[0].startswith("greedy ") else 2 if field[0] in ("nll", "kl", "mass", "tok/s") else 0


def _shown(metrics: Mapping[str, Any], greedy: bool = False) -> dict[str, str]:
    """Name on the line -> text, in the order of the line."""
    fields: dict[str, str] = {}
    if greedy:
        chosen = [
            (key, "greedy " + key[len("greedy/") :], ".2f") for key in metrics if key.startswith("greedy/")
        ]
    else:
        rewards = [key for key in metrics if key.startswith("reward/") and key.endswith("/mean")]
        chosen = [(key, key[len("reward/") : -len("/mean")], ".2f") for key in rewards]
        chosen += [
            ("nll", "nll", ".3f"),
            ("kl", "kl", ".3f"),
            ("teacher_mass", "mass", ".2f"),
            ("tokens_per_second", "tok/s", ",.0f"),
        ]
    for key, name, form in chosen:
        try:
            fields[name] = format(float(metrics[key]), form)
        except (KeyError, TypeError, ValueError):
            continue
    return fields


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
