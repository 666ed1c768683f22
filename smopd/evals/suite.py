"""The protocol of an evaluation suite: its items, scores, table columns and command-line options."""

from __future__ import annotations

import csv
import importlib.util
import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Protocol

import tyro

from smopd.data.places import VARIABLE, how_to_fetch, located

PAPER = Path(__file__).with_name("paper")
GROUND_TRUTH = "ground-truth"
DATA_HINT = f"(default: the suite's own, in ${VARIABLE} or the user's cache; see smopd data)"

Message = Mapping[str, str]  # with the keys `role` and `content`
Scores = Mapping[str, Any]
"""The scores of one response, by name. Each is a JSON number, bool, string or null."""


@dataclass(frozen=True)
class Item:
    """One prompt of a suite.

    key: a name that is unique in the suite and the same in every run.
    group: a category or level. The bootstrap resamples items within their group.
    messages: the chat to answer.
    truth: the reference answer as a JSON value, or None.
    """

    key: str
    group: str
    messages: tuple[Message, ...]
    truth: Any = None


class Column(NamedTuple):
    """A table column: its key in `Suite.summary`, its heading, and the scale and digits of its numbers."""

    key: str
    heading: str
    scale: float = 1.0
    digits: int = 4


class Suite(Protocol):
    """An evaluation suite. A subclass inherits `only`, `truths` and `paper`, and defines the rest."""

    name: str
    title: str
    items: Sequence[Item]
    columns: Sequence[Column]

    def only(self, indices: Sequence[int]) -> Suite:
        """Return a copy of the suite with only these items, in this order."""
        chosen = copy(self)
        chosen.items = [self.items[i] for i in indices]
        return chosen

    def score(self, responses: Sequence[str]) -> list[Scores]:
        """Score one response per item, in the order of the items. Responses contain no chat markers."""

    def summary(self, groups: Sequence[str], scores: Sequence[Scores]) -> dict[str, float | None]:
        """Return the value of each column, and any other values, by name. A value without scores is None.

        `groups` and `scores` may repeat items, because the bootstrap also calls this method.
        """

    def truths(self) -> list[str] | None:
        """Return a perfect response to each item, or None if the suite has no ground truth."""
        return None

    def paper(self) -> Mapping[str, Mapping[str, float]]:
        """Read the paper's rows from paper/NAME.csv. Return label -> column key -> unscaled value."""
        file = PAPER / f"{self.name}.csv"
        if not file.is_file():
            return {}
        with file.open(newline="") as lines:
            rows = {row.pop("responses"): row for row in csv.DictReader(lines)}
        scales = {column.key: column.scale for column in self.columns}
        return {
            label: {key: round(float(row[key]) / scale, 6) for key, scale in scales.items() if row.get(key)}
            for label, row in rows.items()
        }


@dataclass(frozen=True)
class Evaluation:
    """Base class of each suite's command-line options."""

    default_data: ClassVar[str]
    """Short name of the data to use if `data` is not given."""

    model: Annotated[str | None, tyro.conf.arg(metavar="PATH")] = None
    """A model folder or hub id. One response per item is sampled."""
    responses: Annotated[str | None, tyro.conf.arg(metavar="FILE|ground-truth")] = None
    """A file of saved responses (JSON lines with `response` or `completion`), or the word ground-truth. Lines
    have the items' order, or each has a `key`. SUITE_items.jsonl and bfcl-eval's result files also work."""
    engine: Literal["local", "vllm"] = "local"
    """The sampling engine."""
    data: Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint=DATA_HINT)] = None
    """The folder of the items, one file of that folder, or a short name."""
    limit: int | None = None
    """Maximum number of items to evaluate, shared out among the groups. Every run chooses the same items."""
    output: Path = Path("runs/evaluate")
    """Output folder."""
    max_new_tokens: int = 1024
    """Maximum response length in tokens."""
    max_prompt_tokens: int | None = None
    """Maximum prompt length in tokens. Longer prompts are cut on the left, and the result counts them."""
    temperature: float = 0.0
    """Sampling temperature. 0 means greedy decoding, as in the paper."""
    seed: int = 0
    """Sampling seed."""
    compare: bool = False
    """Also show the paper's rows in the table."""

    @property
    def data_path(self) -> Path:
        """Return the path of the items. Raises FileNotFoundError if the data of a short name is absent."""
        return located(self.data or self.default_data)

    def suite(self) -> Suite:
        """Build the suite with its items. Raises ValueError or FileNotFoundError for bad options or data."""
        raise NotImplementedError

    def prepare(self, suite: Any) -> None:
        """Load what scoring needs, before sampling starts. Raises the same errors as `suite`."""

    def settings(self, suite: Any) -> dict[str, Any]:
        """Return the suite's settings and costs, which are written to SUITE.json."""
        return {}

    def notes(self, suite: Any, summary: Mapping[str, float | None]) -> list[str]:
        return []

    def check(self) -> None:
        """Check the options that all suites share. Raises ValueError."""
        if (self.model is None) == (self.responses is None):
            got = "none" if self.model is None else "both"
            raise ValueError(f"expected one of --model and --responses, got {got}")
        require_at_least(self, limit=1, max_new_tokens=1, max_prompt_tokens=1)
        if not 0.0 <= self.temperature < math.inf:
            raise ValueError(f"--temperature is {self.temperature}, expected 0 or more")
        if self.output.exists() and not self.output.is_dir():
            raise ValueError(f"--output {self.output}: expected a folder, got a file")
        if self.model and self.engine == "vllm" and importlib.util.find_spec("vllm") is None:
            raise ValueError("--engine vllm: vllm is not installed (see docs/engines.md); or use local")


def require_at_least(options: Any, prefix: str = "--", **least: int) -> None:
    """Raise ValueError if an option is below its minimum. Options that are None are not checked."""
    for name, lowest in least.items():
        value = getattr(options, name)
        if value is not None and value < lowest:
            raise ValueError(f"{prefix}{name.replace('_', '-')} is {value}, expected at least {lowest}")


def group_files(data: Path, names: Mapping[str, str], what: str) -> dict[str, Path]:
    """Map each group to its file in folder `data`, or one group to file `data`. Errors begin with `what`."""
    expected = ", ".join(names.values())
    if data.is_file():
        found = {group: data for group, name in names.items() if name == data.name}
        if not found:
            raise ValueError(f"{what} {data}: expected a folder, or one of {expected}")
        return found
    found = {group: data / name for group, name in names.items()}
    for path in found.values():
        if not path.is_file():
            raise FileNotFoundError(f"{what} {path}: no such file, expected {expected}{how_to_fetch(path)}")
    return found
