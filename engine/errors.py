"""Errors shared by several packages. Imports no torch."""

from __future__ import annotations


class NoServer(RuntimeError):
    """An engine has no server left."""


class NonFinite(RuntimeError):
    """A gradient, a weight or a log-probability is NaN or infinite."""


class UnusableModel(ValueError):
    """A model that cannot be trained, sampled or scored."""
