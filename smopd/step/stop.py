"""Recoverable errors and signals. They end a run between two updates, after a checkpoint.

A signal ends the run after the current step. A second signal ends it at once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch

from smopd.engine import distributed
from smopd.engine.errors import CannotSend, Failure, NonFinite, NoServer
from smopd.engine.files import DamagedFile
from smopd.engine.process import SAME_SECONDS, stop_signals, tell
from smopd.rewards.pool import RewardError


class StaleRollout(Failure, RuntimeError):
    """A response was sampled by an older policy than `loop.async_level` allows."""


RECOVERABLE = (NoServer, CannotSend, RewardError, StaleRollout, DamagedFile)
all_or_raise = partial(distributed.all_or_raise, errors=(*RECOVERABLE, NonFinite))


class Stopped(BaseException):
    """A signal ended the command, on every rank if `agreed`. `except Exception` does not catch this."""

    def __init__(self, number: int, done: str, *, agreed: bool = False):
        self.agreed = agreed
        self.status = 128 + number  # as a shell reports it
        super().__init__(f"stopped by {signal.Signals(number).name}; {done}; rerun to resume")


class Stop:
    """Context manager that suppresses Stopped and, in the main thread, handles `stop_signals`."""

    def __init__(self) -> None:
        self.number = 0
        """The first signal that arrived, or 0."""
        self._postponed = False
        self._first = 0.0  # time.monotonic() of the first signal
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in stop_signals()}
        return self

    def __exit__(self, kind: object, exception: object, trace: object) -> bool:
        for number, before in self._before.items():
            signal.signal(number, before)
        return isinstance(exception, Stopped)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.number:
            self._first, self.number = now, number
            if not self._postponed:
                raise self._stopped()
            if os.environ.get("RANK", "0") == "0":
                tell("stopping after this step, with a checkpoint; repeat the signal to stop now")
        elif now - self._first >= SAME_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _stopped(self) -> Stopped:
        return Stopped(self.number, "finished runs are kept")

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """Inside the context, only record signals. Raise Stopped for them when the outermost context ends."""
        before, self._postponed = self._postponed, True
        try:
            yield
        finally:
            self._postponed = before
        if self.number and not before:
            raise self._stopped()

    def asked(self) -> int:
        """Return a signal that any rank has received, or 0. This is a collective call."""
        return int(distributed.all_reduce(torch.tensor(self.number), "max"))
