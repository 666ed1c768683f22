"""Errors that cross the packages, without torch."""

from __future__ import annotations


class NoServer(RuntimeError):
    """An engine has no server left."""
