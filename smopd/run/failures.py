"""Errors that the user can fix, printed without a traceback."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import yaml

from smopd.engine.errors import Failure, UnusableInput, UserCodeError
from smopd.record.progress import say_error

MISTAKES = (Failure, ValueError, OSError, RecursionError, yaml.YAMLError)
"""Errors that a command reports in one line. JSON that is nested too deeply raises RecursionError."""


@contextmanager
def one_line(command: str) -> Iterator[None]:
    """Report MISTAKES in one line on stderr, and exit with status 2."""
    try:
        yield
    except MISTAKES as error:
        say_error(f"{command}: {error}")
        sys.exit(2)


@contextmanager
def error_context(setting: str) -> Iterator[None]:
    """Convert errors about an input to UnusableInput, with the name of the setting."""
    try:
        yield
    except (ValueError, ImportError, OSError, UserCodeError) as error:
        raise UnusableInput(f"{setting}: {error}") from error
    except MemoryError as error:
        raise UnusableInput(f"{setting}: needs more memory than this process has") from error
