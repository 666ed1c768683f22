"""Errors that the user can fix, printed without a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from smopd.engine.distributed import LostRank
from smopd.engine.errors import NoServer
from smopd.engine.files import FullDisk
from smopd.engine.student.checkpoint import UnusableCheckpoint
from smopd.engine.student.student import NonFiniteGradient
from smopd.record.files import DamagedLog
from smopd.rewards.pool import RewardError
from smopd.run.folder import ConfigMismatch, RunDirLocked
from smopd.step.ends import StaleRollout


class UnusableInput(RuntimeError):
    """Data, a model or a plan that cannot be used."""


FAILURES = (
    RunDirLocked,
    DamagedLog,
    FullDisk,
    LostRank,
    NoServer,
    NonFiniteGradient,
    ConfigMismatch,
    RewardError,
    StaleRollout,
    UnusableCheckpoint,
    UnusableInput,
)


@contextmanager
def error_context(setting: str) -> Iterator[None]:
    """Turn errors about an input into UnusableInput with the name of its setting."""
    try:
        yield
    except (ValueError, ImportError, OSError) as error:
        raise UnusableInput(f"{setting}: {error}") from error
    except MemoryError as error:
        raise UnusableInput(f"{setting}: needs more memory than this process has") from error
