"""Errors that the user can fix, printed without a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from smopd.engine.distributed import LostRank
from smopd.engine.errors import NonFinite, NoServer, UnusableModel
from smopd.engine.files import CannotWrite, DamagedFile
from smopd.engine.student.checkpoint import UnusableCheckpoint
from smopd.rewards.pool import RewardError
from smopd.run.folder import ConfigMismatch
from smopd.run.lease import RunDirLocked
from smopd.step.stop import StaleRollout


class UnusableInput(RuntimeError):
    """Data, a model or a plan that cannot be used."""


FAILURES = (
    RunDirLocked,
    CannotWrite,
    DamagedFile,
    LostRank,
    NoServer,
    NonFinite,
    ConfigMismatch,
    RewardError,
    StaleRollout,
    UnusableCheckpoint,
    UnusableInput,
    UnusableModel,
    OSError,
)
"""Errors of the user's files, models, servers and machine. Any other is a mistake of smopd."""


@contextmanager
def error_context(setting: str) -> Iterator[None]:
    """Turn errors about an input into UnusableInput with the name of its setting."""
    try:
        yield
    except (ValueError, ImportError, OSError) as error:
        raise UnusableInput(f"{setting}: {error}") from error
    except MemoryError as error:
        raise UnusableInput(f"{setting}: needs more memory than this process has") from error
