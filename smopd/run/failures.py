"""Errors that the user can fix, printed without a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import yaml

from smopd.engine.errors import Failure, UnusableInput

MISTAKES = (Failure, ValueError, OSError, RecursionError, yaml.YAMLError)
"""What a command answers in one line. JSON of the user that is too deep raises RecursionError."""


@contextmanager
def error_context(setting: str) -> Iterator[None]:
    """Turn errors about an input into UnusableInput with the name of its setting."""
    try:
        yield
    except (ValueError, ImportError, OSError) as error:
        raise UnusableInput(f"{setting}: {error}") from error
    except MemoryError as error:
        raise UnusableInput(f"{setting}: needs more memory than this process has") from error
