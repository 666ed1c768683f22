"""Names that people write: the form of an import path, and the hint where a name is nearly right."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
"""`package.module:function`, or a method as `package.module:Class.method`."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

STEP_COLUMN = "training_step"
"""The column of the step, from 0, that rewards are given beside the data's own while training."""
REWARD_ARGUMENTS = ("prompts", "completions", STEP_COLUMN)
"""What no column of the data and no keyword argument of a reward may be called."""


def is_url(model: str) -> bool:
    """Whether a model's name is one URL or several with commas, not a path or hub id."""
    return model.startswith(("http://", "https://"))


def nearest(name: str, names: Iterable[str]) -> str:
    """`; did you mean NAME?` for an error message, or nothing where no name is near."""
    close = difflib.get_close_matches(name, list(names), 1, 0.6)
    return f"; did you mean {close[0]}?" if close else ""


def printable(text: str) -> str:
    """Without control characters but tab and newline: a terminal obeys them, whoever wrote them."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)
