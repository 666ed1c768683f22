"""Errors that cross the packages, without torch."""

from __future__ import annotations


class NoServer(RuntimeError):
    """Every server of an engine has been taken out."""
