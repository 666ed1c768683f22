"""An end that a signal asks for: after the step, with a checkpoint; the same signal again ends at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from smopd.engine import distributed

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopped(Exception):
    """A signal ended the command.

    Args:
        number: of the signal.
        done: what is finished and kept.
    """

    def __init__(self, number: int, done: str):
        self.status = 128 + number
        """The exit status, as of a shell."""
        super().__init__(f"stopped by {signal.Signals(number).name}; {done}; the same command goes on")


class Stop:
    """Takes SIGTERM and SIGINT as a context manager in the main thread; elsewhere it never asks."""

    def __init__(self) -> None:
        self.number = 0
        """Of the signal that came while it was postponed."""
        self._postponed = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._come) for number in SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _come(self, number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        if not self._postponed:
            raise Stopped(number, "what was finished before is kept")
        if not self.number and os.environ.get("RANK", "0") == "0":
            os.write(2, b"the command ends after this step, with a checkpoint; the same signal ends it now\n")
        self.number = self.number or number

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """Within it a signal is only noted."""
        self._postponed = True
        try:
            yield
        finally:
            self._postponed = False

    def asked(self) -> int:
        """A signal that has come to some rank, or 0; a collective call."""
        return int(distributed.all_reduce(torch.tensor(self.number), "max"))
