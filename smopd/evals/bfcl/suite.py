"""BFCL v4, single turn: the 2,501 AST items and the relevance sets, as a suite.

Data and AST checker are those of the package bfcl-eval. As in BFCL, a response is right in irrelevance where
it makes no call that can be read, and in live_relevance where it makes one. An attempted call that cannot be
read is counted apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import tyro

from smopd.evals.bfcl.calls import Form, perfect_calls, read_calls, write_calls
from smopd.evals.bfcl.metrics import (
    AST,
    COLUMNS,
    IRRELEVANCE,
    RELEVANCE,
    missing_parts,
    parse_categories,
    read_scores,
    summarise,
)
from smopd.evals.bfcl.official import (
    INSTALL,
    Answer,
    Call,
    Function,
    find_mistake,
    folder,
    installed_version,
    language_of,
)
from smopd.evals.bfcl.prompts import frame, messages
from smopd.evals.options import Evaluation, read_lines
from smopd.evals.suite import Column, Item, Scores, Suite

FILE = "BFCL_v4_{}.json"
ANSWERS = "possible_answer"


@dataclass(frozen=True)
class BfclItem(Item):
    """An item with the functions that it offers."""

    functions: Sequence[Function] = field(default=())


class BfclSuite(Suite):
    """Serves `Suite`.

    Args:
        items: of `load_items`.
        form: how responses are read.
        underscores: a function a.b was shown as a_b.
        more: accuracies of categories that are not among the items, by name.
    """

    name = "bfcl"
    title = "BFCL v4"
    columns: Sequence[Column] = COLUMNS
    items: Sequence[BfclItem]

    def __init__(
        self,
        items: Sequence[BfclItem],
        *,
        form: Form = "rlla",
        underscores: bool = False,
        more: Mapping[str, float] | None = None,
    ) -> None:
        self.items = items
        self.form, self.underscores, self.more = form, underscores, dict(more or {})

    def score(self, responses: Sequence[str]) -> list[Scores]:
        """`correct`, the number of `calls` (None: they cannot be read), and the first `mistake`.

        A response of the relevance sets may be correct and have a mistake: an attempt that cannot be read is
        no call to BFCL.
        """
        if len(responses) != len(self.items):
            raise ValueError(f"bfcl: expected {len(self.items)} responses, got {len(responses)}")
        return [self._score(item, response) for item, response in zip(self.items, responses, strict=True)]

    def _score(self, item: BfclItem, response: str) -> Scores:
        calls: list[Call] | None
        try:
            calls, mistake = read_calls(response, self.form, language_of(item.group)), None
        except ValueError as error:
            calls, mistake = None, f"unreadable: {error}"
        correct = bool(calls) != (item.group in IRRELEVANCE)
        if item.group in AST:
            if calls is not None:
                mistake = find_mistake(
                    item.functions, calls, item.truth, item.group, underscores=self.underscores
                )
            correct = mistake is None
        elif not correct and mistake is None:
            mistake = "a call, expected none" if calls else "no call, expected one"
        return {"correct": correct, "calls": None if calls is None else len(calls), "mistake": mistake}

    def summary(self, groups: Sequence[str], scores: Sequence[Scores]) -> dict[str, float | None]:
        """Accuracies and their means, as fractions (metrics.py), and `unreadable` responses by category."""
        right, unreadable = Counter[str](), Counter[str]()
        for group, score in zip(groups, scores, strict=True):
            right[group] += score["correct"]
            unreadable[group] += score["calls"] is None
        accuracies = {group: right[group] / count for group, count in Counter(groups).items()}
        counts: dict[str, float | None] = {f"unreadable/{group}": n for group, n in unreadable.items()}
        return summarise({**self.more, **accuracies}) | {"unreadable": unreadable.total()} | counts

    def truths(self) -> list[str]:
        """Perfect responses: what is allowed; in irrelevance no call, in relevance any.

        `perfect_calls` names the six answers that no response meets.
        """
        return [write_calls(self._perfect(item), self.form, language_of(item.group)) for item in self.items]

    def _perfect(self, item: BfclItem) -> list[Call]:
        if item.group in AST:
            return perfect_calls(item.functions, item.truth, item.group, underscores=self.underscores)
        return [] if item.group in IRRELEVANCE else [Call(item.functions[0]["name"], {})]


@dataclass(frozen=True)
class Bfcl(Evaluation):
    """Score a model, or saved responses, on BFCL v4's single-turn categories: AST, relevance, Overall.

    The items are those of the installed package bfcl-eval; `data` is another folder of BFCL_v4_*.json with
    possible_answer/ in it.
    """

    default_data: ClassVar[str] = "bfcl-eval"

    categories: tuple[str, ...] = ("all",)
    """Of all, ast, non_live, live, relevance, or single categories such as live_simple."""
    form: Form = "rlla"
    """How items are asked and answers read: as RLLA models do, or BFCL's list of Python calls."""
    words: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """In the form rlla, ask in the words of a file of RLLA items, not in ours."""
    underscores: bool = False
    """Show a function a.b as a_b, for models whose names know no dots."""
    multi_turn_scores: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """A folder of bfcl-eval's score files, from which Overall takes the multi-turn and agentic parts."""

    @property
    def data_path(self) -> Path:
        return folder() / "data" if self.data is None else self.data.expanduser()

    def suite(self) -> BfclSuite:
        folder()  # its absence is the first thing to say
        categories = parse_categories(self.categories)
        more = read_scores(self.multi_turn_scores.expanduser()) if self.multi_turn_scores else {}
        items = load_items(
            self.data_path, categories, form=self.form, words=self.words, underscores=self.underscores
        )
        return BfclSuite(items, form=self.form, underscores=self.underscores, more=more)

    def settings(self, suite: Any) -> dict[str, Any]:
        """The version of bfcl-eval and how items were asked."""
        categories = dict.fromkeys(item.group for item in suite.items)
        own = {name: getattr(self, name) for name in ("form", "words", "underscores")}
        return {"bfcl_eval": installed_version(), **own, "categories": list(categories)}

    def notes(self, suite: Any, summary: Mapping[str, float | None]) -> list[str]:
        """What Overall counts as 0, and attempts to call that BFCL takes for none."""
        missing = missing_parts(summary)
        shares = {group: summary.get(group) for group in dict.fromkeys(item.group for item in suite.items)}
        notes = [
            ", ".join(f"{group} {100 * share:.2f}" for group, share in shares.items() if share is not None)
        ]
        if missing:
            notes.append(f"Overall counts as 0 what did not run: {', '.join(missing)}")
        if tried := sum(summary.get(f"unreadable/{group}") or 0 for group in RELEVANCE):
            notes.append(f"{tried:.0f} responses of the relevance sets attempt a call that cannot be read: "
                         "BFCL counts them as no call")  # fmt: skip
        return notes


def load_items(
    data: Path,
    categories: Sequence[str],
    *,
    form: Form = "rlla",
    words: str | None = None,
    underscores: bool = False,
) -> list[BfclItem]:
    """The items of a folder of BFCL's files; arguments as of `Bfcl`.

    Raises:
        ValueError, FileNotFoundError: a file is absent or malformed, or an item has no answer.
    """
    asked, items = frame(form, words), []
    for category in categories:
        name = FILE.format(category)
        answers: dict[str, list[Answer]] = {}
        if category in AST:
            rows = _lines(data / ANSWERS / name, ("id", "ground_truth"))
            answers = {row["id"]: row["ground_truth"] for row in rows}
        for row in _lines(data / name, ("id", "question", "function")):
            if category in AST and row["id"] not in answers:
                raise ValueError(f"{data / ANSWERS / name}: has no answer to {row['id']}")
            functions = row["function"]
            chat = messages(row["question"][0], functions, category, form, asked, underscores=underscores)
            items.append(BfclItem(row["id"], category, chat, answers.get(row["id"]), functions))
    return items


def _lines(path: Path, keys: Sequence[str]) -> list[dict[str, Any]]:
    if not path.is_file():
        raise FileNotFoundError(
            f"BFCL data {path}: no such file, expected BFCL v4's files, as of `{INSTALL}`"
        )
    rows = read_lines(path)
    for number, row in rows:
        if any(key not in row for key in keys):
            raise ValueError(f"{path}: line {number}: expected {', '.join(keys)}, got {sorted(row)}")
    return [row for _, row in rows]
