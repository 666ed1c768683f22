"""What an evaluation is: items, the scores of responses, a table row, and the options of its command."""

from __future__ import annotations

import csv
import importlib.util
import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol

import tyro

from smopd.data.places import VARIABLE, how_to_fetch, located

PAPER = Path(__file__).with_name("paper")
GROUND_TRUTH = "ground-truth"
DATA_HINT = f"(default: the suite's own in ${VARIABLE} or the user's cache; python -m smopd.data)"

Message = Mapping[str, str]
"""`role` and `content`."""
Scores = Mapping[str, Any]
"""What is kept of one scored response: numbers, bools and short texts by name, all of them JSON."""


@dataclass(frozen=True)
class Item:
    """One prompt of a suite.

    key: unique in the suite, and the same in every run.
    group: its category or level; bootstrap samples are drawn within a group.
    messages: the chat that is asked.
    truth: what a response is compared with, as JSON; None where nothing is.
    """

    key: str
    group: str
    messages: tuple[Message, ...]
    truth: Any = None


@dataclass(frozen=True)
class Column:
    """A column of the table: its key in `Suite.summary`, the paper's heading, and how a value is printed."""

    key: str
    heading: str
    scale: float = 1.0
    digits: int = 4


class Suite(Protocol):
    """One evaluation. A suite may inherit the methods that have a body here."""

    name: str
    title: str
    items: Sequence[Item]
    columns: Sequence[Column]

    def only(self, indices: Sequence[int]) -> Suite:
        """The same suite with these items alone, in this order."""
        chosen = copy(self)
        chosen.items = [self.items[i] for i in indices]
        return chosen

    def score(self, responses: Sequence[str]) -> list[Scores]:
        """One for each item, in order. A response is the generated text without chat markers."""
        ...

    def summary(self, groups: Sequence[str], scores: Sequence[Scores]) -> dict[str, float | None]:
        """The columns' values, and more by other names; None where nothing was scored.

        groups, scores: of any items, repeats allowed, as a bootstrap draws them.
        """
        ...

    def truths(self) -> list[str] | None:
        """A perfect response to each item; None where the suite has no ground truth."""
        return None

    def paper(self) -> Mapping[str, Mapping[str, float]]:
        """The paper's rows, from paper/NAME.csv: label -> column key -> value before `scale`."""
        file = PAPER / f"{self.name}.csv"
        if not file.is_file():
            return {}
        with file.open(newline="") as lines:
            rows = {row.pop("responses"): row for row in csv.DictReader(lines)}
        return {
            label: {
                column.key: round(float(row[column.key]) / column.scale, 6)
                for column in self.columns
                if row.get(column.key)
            }
            for label, row in rows.items()
        }


@dataclass(frozen=True)
class Evaluation:
    """Base of the suites' options."""

    default_data: ClassVar[str]
    """A short name, used where `data` is not given."""

    model: Annotated[str | None, tyro.conf.arg(metavar="PATH")] = None
    """A model's folder or hub id; one response to each item is sampled from it."""
    responses: Annotated[str | None, tyro.conf.arg(metavar="FILE|ground-truth")] = None
    """JSON lines with `response` (or `completion`), one for each item in order, or in any order with the
    items' `key`, as SUITE_items.jsonl has them; bfcl-eval's result files; or the items' own truth."""
    engine: Literal["local", "vllm"] = "local"
    """What samples from the model."""
    data: Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint=DATA_HINT)] = None
    """The items: their folder or one of its files, or the short name of either."""
    limit: int | None = None
    """Evaluate so many items, evenly spread, each group by its share; the same ones every time."""
    output: Path = Path("runs/evaluate")
    """The folder to write into."""
    max_new_tokens: int = 1024
    """Longest response in tokens."""
    max_prompt_tokens: int | None = None
    """Longest prompt in tokens; of longer ones the end is kept, and they are counted. None is no limit."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy, as in the paper."""
    seed: int = 0
    """Seed of the sampling."""
    compare: bool = False
    """Show the paper's rows too."""

    @property
    def data_path(self) -> Path:
        """Where the items are; FileNotFoundError where a short name's data is absent."""
        return located(self.data or self.default_data)

    def suite(self) -> Suite:
        """The suite with its items; ValueError or FileNotFoundError for a mistake in options or data."""
        raise NotImplementedError

    def prepare(self, suite: Any) -> None:
        """Loads what the scoring needs, before anything is sampled; raises as `suite`."""

    def settings(self, suite: Any) -> dict[str, Any]:
        """More to write beside the scores: settings of the suite, what scoring cost."""
        return {}

    def notes(self, suite: Any, summary: Mapping[str, float | None]) -> list[str]:
        """Lines to print below the table."""
        return []

    def check(self) -> None:
        """Raises ValueError for a mistake in the options that all suites have."""
        if (self.model is None) == (self.responses is None):
            got = "none" if self.model is None else "both"
            raise ValueError(f"expected one of --model and --responses, got {got}")
        require_at_least(self, limit=1, max_new_tokens=1, max_prompt_tokens=1)
        if not 0.0 <= self.temperature < math.inf:
            raise ValueError(f"--temperature is {self.temperature}, expected 0 or more")
        if self.output.exists() and not self.output.is_dir():
            raise ValueError(f"--output {self.output}: is no folder")
        if self.model and self.engine == "vllm" and importlib.util.find_spec("vllm") is None:
            raise ValueError("--engine vllm: vllm is not installed, expected it, or --engine local")


def require_at_least(options: Any, prefix: str = "--", **least: int) -> None:
    """Raises ValueError for an option below its least value; None passes."""
    for name, lowest in least.items():
        value = getattr(options, name)
        if value is not None and value < lowest:
            raise ValueError(f"{prefix}{name.replace('_', '-')} is {value}, expected at least {lowest}")


def group_files(data: Path, names: Mapping[str, str], what: str) -> dict[str, Path]:
    """Group -> its file: all groups of a folder, or the one whose file is given.

    Args:
        names: group -> name of its file.
        what: for error messages, such as "API-Bank data".
    """
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
