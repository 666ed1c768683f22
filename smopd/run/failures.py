"""Errors that the user can fix, printed without a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from smopd.engine.errors import UnusableInput


@contextmanager
def error_context(setting: str) -> Iterator[None]:
    """Turn errors about an input into UnusableInput with the name of its setting."""
    try:
        yield
    except (ValueError, ImportError, OSError) as error:
        raise UnusableInput(f"{setting}: {error}") from error
    except MemoryError as error:
        raise UnusableInput(f"{setting}: needs more memory than this process has") from error
