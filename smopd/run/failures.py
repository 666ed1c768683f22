"""Errors that the user can fix, printed without a traceback."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import yaml

from smopd.engine.errors import Failure, UnusableInput
from smopd.record.progress import say_error

MISTAKES = (Failure, ValueError, OSError, RecursionError, yaml.YAMLError)
"""Errors that a command reports in one line. JSON that is nested too deeply raises RecursionError."""


@contextmanager
def one_line(command: str) -> Iterator[None]:
    """Turn MISTAKES into one line on stderr and exit status 2."""
    try:
        yield
    except MISTAKES as error:
        say_error(f"{command}: {error}")
        sys.exit(2)


@contextmanager
def error_context(setting: str) -> Iterator[None]:
    """Turn errors about an input into UnusableInput with the name of its setting."""
    try:
        yield
    except (ValueError, ImportError, OSError) as error:
        raise UnusableInput(f"{setting}: {error}") from error
    except MemoryError as error:
        raise UnusableInput(f"{setting}: needs more memory than this process has") from error
