"""What a user can act on: raised with the setting's name, answered in a few lines, without a traceback."""

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
    """Data, a model or a plan that a run cannot begin with."""


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
    """Turns what is wrong with an input into an answer that names its setting."""
    try:
        yield
    except (ValueError, ImportError, OSError) as error:
        raise UnusableInput(f"{setting}: {error}") from error
    except MemoryError as error:
        raise UnusableInput(f"{setting}: takes more memory than this process has") from error
