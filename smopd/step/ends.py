"""What ends a run between two updates, and how far the run is then: a checkpoint holds that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from smopd.engine import distributed
from smopd.engine.errors import NoServer
from smopd.rewards.pool import RewardError


class StaleRollout(RuntimeError):
    """A response comes from a policy that is older than `loop.async_level` allows."""


RECOVERABLE = (NoServer, RewardError, StaleRollout)
all_or_raise = partial(distributed.all_or_raise, errors=RECOVERABLE)


@dataclass
class Progress:
    """What is done of a run: `step` updates, and a batch of the next step that was begun `ahead`."""

    step: int
    ahead: dict[str, Any] | None
    to_record: Callable[[], None] | None = None
    """Writes the last step's metrics, where that is still to do."""

    def updated(self, record: Callable[[], None]) -> None:
        """One step more; `record` is to come."""
        self.step, self.ahead, self.to_record = self.step + 1, None, record

    def record(self) -> None:
        record, self.to_record = self.to_record, None
        if record is not None:
            record()
