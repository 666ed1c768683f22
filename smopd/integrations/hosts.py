"""What every integration asks of its host: that it is there, and that its functions are the ones we know."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.version import Version


def require_host(package: str, first: str, before: str) -> str:
    """The installed version of `package`, which has to be at least `first` and below `before`.

    Raises:
        ImportError: the package is not installed, or is of a version that this integration does not know.
    """
    known = f"{package}>={first},<{before}"
    try:
        installed = version(package)
    except PackageNotFoundError:
        raise ImportError(
            f"smopd.integrations needs {package}, which is not installed: pip install '{known}'"
        ) from None
    if not Version(first) <= Version(installed) < Version(f"{before}.dev0"):
        raise ImportError(
            f"smopd.integrations knows the functions of {known}; {package} {installed} is installed. "
            f"pip install '{known}', or an smopd that knows {installed}"
        )
    return installed


def require_parameters(function: Callable[..., Any], *names: str) -> None:
    """Refuses, by name, a host's function that no longer takes the parameters we call or replace it with.

    Raises:
        ImportError: a parameter of `names` is missing.
    """
    parameters = inspect.signature(function).parameters
    missing = [name for name in names if name not in parameters]
    if missing:
        raise ImportError(
            f"{function.__module__}.{function.__qualname__} has no parameter {', '.join(missing)}; "
            f"it has {', '.join(parameters)}: not the function that smopd.integrations knows"
        )
