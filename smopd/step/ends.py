"""Errors that end a run between two updates, after a checkpoint."""

from __future__ import annotations

from functools import partial

from smopd.engine import distributed
from smopd.engine.errors import NonFinite, NoServer
from smopd.rewards.pool import RewardError


class StaleRollout(RuntimeError):
    """A response was sampled by an older policy than `loop.async_level` allows."""


RECOVERABLE = (NoServer, RewardError, StaleRollout)
all_or_raise = partial(distributed.all_or_raise, errors=(*RECOVERABLE, NonFinite))
