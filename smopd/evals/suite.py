"""What an evaluation suite is: items, how a response to each is scored, and how scores become a table row."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

PAPER = Path(__file__).with_name("paper")

Message = Mapping[str, str]
"""`role` and `content`."""
Scores = Mapping[str, Any]
"""What is kept of one scored response: numbers, bools and short texts by name, all of them JSON."""


@dataclass(frozen=True)
class Item:
    """One prompt of a suite.

    Attributes:
        key: tells it from the suite's other items, the same in every run.
        group: the category or level it belongs to; bootstrap samples are drawn within a group.
        messages: the chat that is asked.
        truth: what a response is compared with, as JSON; None where nothing is.
    """

    key: str
    group: str
    messages: tuple[Message, ...]
    truth: Any = None


@dataclass(frozen=True)
class Column:
    """A column of the suite's table.

    Attributes:
        key: of `Suite.summary`.
        heading: as the paper prints it.
        scale: 100 for percent.
        digits: after the point.
    """

    key: str
    heading: str
    scale: float = 1.0
    digits: int = 4


class Suite(Protocol):
    """One evaluation; a suite may inherit what stands here with a body.

    Scoring sees texts alone, so that saved responses and a model's are scored alike.
    """

    name: str
    """As on the command line."""
    title: str
    items: Sequence[Item]
    columns: Sequence[Column]

    def only(self, indices: Sequence[int]) -> Suite:
        """A suite like this one of these items alone, in this order."""
        chosen = copy(self)
        chosen.items = [self.items[i] for i in indices]
        return chosen

    def score(self, responses: Sequence[str]) -> list[Scores]:
        """One for each item, in order. A response is the generated text alone, without markers."""
        ...

    def summary(self, groups: Sequence[str], scores: Sequence[Scores]) -> dict[str, float | None]:
        """The values of the columns, and more by other names; None where nothing was scored.

        Args:
            groups, scores: of any items, repeats allowed, as a bootstrap draws them.
        """
        ...

    def truths(self) -> list[str] | None:
        """The ground truth of each item as a perfect response, or None where there is none."""
        return None

    def paper(self) -> Mapping[str, Mapping[str, float]]:
        """The paper's rows: label -> column key -> value in the column's own unit before `scale`.

        They are read from paper/NAME.csv, which has them as printed; none where there is no such file.
        """
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
