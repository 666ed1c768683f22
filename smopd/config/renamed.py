"""Error messages for settings of earlier versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from smopd.config.recipe import Keys

ANSWERS: dict[str, str] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
"""Setting -> the rest of the message."""


def renamed(keys: Keys, value: Any) -> str | None:
    """Return the message for a setting or value of an earlier version, None for any other."""
    path = ".".join("N" if isinstance(key, int) else str(key) for key in keys)
    if keys[:1] == ("runs",) and keys[2:] == ("stage",) and value == "control":
        return "is now train"
    if path.endswith(("merge.method", "opd.support", "opd.target")) and value == "product":
        return "product was removed; use merge.method weights, which did as well"
    if keys[:1] == ("runs",) and keys[2:] == ("init",) and isinstance(value, dict):
        return "must be a run's name; for a weight merge use stage: merge and set: {merge: {models: ...}}"
    return ANSWERS.get(path)
