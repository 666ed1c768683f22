"""An end that a signal asks for: after the step, with a checkpoint; the same signal again ends at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from smopd.engine import distributed
from smopd.engine.process import SAME_SECONDS

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopped(BaseException):
    """A signal ended the command; no handler of errors on the way is to take it for one.

    Args:
        number: of the signal.
        done: what is finished and kept.
        agreed: whether every rank ends so.
    """

    def __init__(self, number: int, done: str, *, agreed: bool = False):
        self.agreed = agreed
        self.status = 128 + number  # as of a shell
        super().__init__(f"stopped by {signal.Signals(number).name}; {done}; rerun to resume")


class Stop:
    """Takes SIGTERM and SIGINT as a context manager in the main thread; elsewhere it never asks."""

    def __init__(self) -> None:
        self.number = 0
        """Of the signal that came while it was postponed."""
        self._postponed = False
        self._first = 0.0  # when a signal came, of time.monotonic()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._come) for number in SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _come(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.number:
            self._first, self.number = now, number
            if not self._postponed:
                raise self._stopped()
            if os.environ.get("RANK", "0") == "0":
                notice = b"the command ends after this step, with a checkpoint; the same signal ends it now\n"
                os.write(2, notice)
        elif now - self._first >= SAME_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _stopped(self) -> Stopped:
        return Stopped(self.number, "what was finished before is kept")

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """Within it a signal is only noted; where nothing has answered it at the end, it is answered then."""
        self._postponed = True
        try:
            yield
        finally:
            self._postponed = False
        if self.number:
            raise self._stopped()

    def asked(self) -> int:
        """A signal that has come to some rank, or 0; a collective call."""
        return int(distributed.all_reduce(torch.tensor(self.number), "max"))
