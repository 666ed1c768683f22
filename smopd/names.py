"""Text from users: suggestions for misspelled names, safe terminal output, and redaction of secrets."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

_SECRET_NAME = re.compile(
    r"(?:\w*[_-])?(?:(?:api|access|secret|private)[_-]?key|token|secret|password|passwd|credentials?)",
    re.IGNORECASE,
)
_USER = re.compile(r"(\b\w+://)[^/@\s'\"]+@")
REDACTED = "<redacted>"

STARTUP_SECONDS = 600.0
"""Ours: time limit of importing a reward."""

STEP_COLUMN = "training_step"
"""Column with the training step, from 0, that rewards receive during training."""
REWARD_ARGUMENTS = ("prompts", "completions", STEP_COLUMN)
"""Reserved names: no data column or keyword argument of a reward may use them."""
EVALUATION_VALUES = ("sum", "truncated")
"""What no reward may be called: evaluations have values of these names."""


def is_url(model: str) -> bool:
    """Return whether a model's name is one or several comma-separated URLs."""
    return model.startswith(("http://", "https://"))


def nearest(name: str, names: Iterable[str]) -> str:
    """Return `; did you mean NAME?`, or an empty string if no name is close."""
    close = difflib.get_close_matches(name, list(names), 1, 0.6)
    return f"; did you mean {close[0]}?" if close else ""


def printable(text: str) -> str:
    """Remove URL credentials and control characters except tab and newline, for a terminal."""
    return _USER.sub(r"\1", _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text))


def redacted(value: Any, name: str = "") -> Any:
    """Replace values with a secret's name, and remove URL credentials, for a file."""
    if isinstance(value, dict):
        return {key: redacted(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [redacted(inner, name) for inner in value]
    if isinstance(value, str):
        return REDACTED if value and _SECRET_NAME.fullmatch(name) else _USER.sub(r"\1", value)
    return value
