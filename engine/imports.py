"""Import functions by their import path."""

import difflib
import importlib
import os
import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar, cast

from smopd.engine.errors import Failure, UserCodeError

T = TypeVar("T")

IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
"""`package.module:function`, or a method as `package.module:Class.method`."""


def import_function(path: str) -> Any:
    """Import the function at `path` (see `IMPORT_PATH`).

    Raises:
        ValueError: the path is malformed, or the module or function does not exist.
    """
    if not IMPORT_PATH.fullmatch(path):
        raise ValueError(f"{path!r} is not an import path, expected package.module:function")
    module_name, names = path.split(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(f"{path!r}: {error}") from error
    except Exception:
        with user_code(path):
            raise
    for name in names.split("."):
        if not callable(getattr(found, name, None)):
            close = difflib.get_close_matches(name, {*dir(found)} - {name}, 1, 0.6)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"{path!r}: {module_name} has no function {name!r}{hint}")
        found = getattr(found, name)
    return found


def resolve(name: str, known: Mapping[str, T]) -> T:
    """Return `known[name]` or the function at the import path `name`. Raise ValueError if there is neither.

    An exception from the import or a call of the function becomes UserCodeError, unless it is a Failure.
    """
    if name in known:
        return known[name]
    function: Any = import_function(name)

    def called(*arguments: Any, **options: Any) -> Any:
        with user_code(name):
            return function(*arguments, **options)

    return cast(T, called)


@contextmanager
def user_code(name: str) -> Iterator[None]:
    """Convert exceptions of the code at `name` (not Failure) to UserCodeError. Restore the working folder."""
    here = None
    with suppress(OSError):  # the folder may have been removed
        here = os.getcwd()
    try:
        yield
    except Failure:
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        why = f"{type(error).__name__}: {error} ({place.filename}, line {place.lineno})"
        raise UserCodeError(f"{name} raised {why}") from error
    finally:
        if here is not None:
            os.chdir(here)
