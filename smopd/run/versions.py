"""Which installed versions are newer than any that the tests ran with."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

NEWEST_TESTED = {"torch": "2.14", "transformers": "5.23", "triton": "3.8"}
"""See CONTRIBUTING.md. Of the others, those whose private functions are used are capped."""


def newer_than_tested() -> str | None:
    """One line that names them, or None. Patch releases do not count."""
    newer = []
    for package, tested in NEWEST_TESTED.items():
        try:
            installed = version(package)
        except PackageNotFoundError:
            continue
        if Version(installed).release[:2] > Version(tested).release[:2]:
            newer.append(f"{package} {installed} (tested up to {tested})")
    return f"newer than tested: {', '.join(newer)}" if newer else None
