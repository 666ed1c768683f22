"""What an evaluation suite is: items, how a response to each is scored, and how scores become a table row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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
    """One evaluation. Scoring sees only texts, so that saved responses and a model's are scored alike."""

    name: str
    """As on the command line."""
    title: str
    items: Sequence[Item]
    columns: Sequence[Column]

    def only(self, indices: Sequence[int]) -> Suite:
        """A suite like this one of these items alone, in this order."""
        ...

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
        ...

    def paper(self) -> Mapping[str, Mapping[str, float]]:
        """The paper's rows: label -> column key -> value in the columns' own unit before `scale`."""
        ...


METHODS = (
    "GRPO Baseline",
    "GDPO Baseline",
    "GD2PO Baseline",
    "Accuracy Teacher [0.9,0.1]",
    "Format Teacher [0.1,0.9]",
    "SMOPD",
)
MAIN_ROWS = tuple(f"{backbone} {method}" for backbone in ("Qwen2.5-1.5B", "Qwen2.5-3B") for method in METHODS)
"""Of tables tab:acc_format and tab:apibank_exact, in their order."""


def paper_rows(
    labels: Sequence[str], keys: Sequence[str], values: Sequence[Sequence[float]], scales: Sequence[float]
) -> Mapping[str, Mapping[str, float]]:
    """label -> key -> value, the printed values divided by their columns' scales."""
    return {
        label: {key: round(value / scale, 6) for key, value, scale in zip(keys, line, scales, strict=True)}
        for label, line in zip(labels, values, strict=True)
    }
