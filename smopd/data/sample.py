"""The sample of RLLA that comes with the package: 16 items to train and 8 to evaluate, without any download.

It stands in for the data set only where somebody asked for that, and everything that is made with it says so.
In a recipe a section's `or_sample: [NAME, ...]` becomes `sample: true` where the data of none of these short
names is here, otherwise `sample: false`, when the recipe is read: the run keeps which one it was.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smopd.data.places import here, is_short_name, located

FOLDER = Path(__file__).with_name("sample")
FILES = {"rlla/train": "rlla_train.jsonl", "rlla/sft": "rlla_train.jsonl", "rlla/test": "rlla_test.jsonl"}
"""Short name -> the file that stands in for it."""
RLLA = ("rlla/sft", "rlla/test")
"""Where one of these is here, a sample of them is not needed."""
NOTE = (
    "SAMPLE: 16 items of RLLA to train and 8 to evaluate, which come with the package, not the data set; "
    "`python -m smopd.data fetch rlla tokenizer` gets the whole"
)


def path_of(given: str | os.PathLike[str], *, sample: bool) -> Path:
    """As `places.located`; with `sample`, a short name in FILES is the path of what stands in for it."""
    file = FILES.get(os.fspath(given)) if sample else None
    return located(given) if file is None else FOLDER / file


def stands_in() -> bool:
    """Whether nothing of the data set itself is here."""
    return not any(map(here, RLLA))


def texts() -> list[str]:
    """All texts of the sample, a line an item."""
    return [line for path in sorted(FOLDER.glob("*.jsonl")) for line in path.read_text("utf-8").splitlines()]


def decided(values: Any) -> Any:
    """A recipe's values with each `or_sample` decided as above.

    Raises:
        ValueError: an `or_sample` names something else than short names.
    """
    if isinstance(values, list):
        return [decided(value) for value in values]
    if not isinstance(values, Mapping):
        return values
    found = {key: decided(value) for key, value in values.items() if key != "or_sample"}
    if "or_sample" in values:
        found["sample"] = not any(map(_here, values["or_sample"]))
    return found


def is_used(values: Any) -> bool:
    """Whether a section of a recipe's values, as `decided` leaves them, has `sample: true`."""
    if isinstance(values, Mapping):
        return values.get("sample") is True or any(map(is_used, values.values()))
    return isinstance(values, (list, tuple)) and any(map(is_used, values))


def _here(name: object) -> bool:
    if not isinstance(name, str) or not is_short_name(name):
        raise ValueError(f"or_sample: {name!r} is no short name of data (python -m smopd.data)")
    return here(name)
