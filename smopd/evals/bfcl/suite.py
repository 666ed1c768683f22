"""BFCL v4, single turn: the 2,501 AST items and the relevance sets, as a suite.

`python -m smopd.evaluate bfcl --model PATH`. A response is right in an AST category where its calls are those
that the answers allow (checker.py, or the package bfcl-eval), in irrelevance where it makes no call that can
be read, in live_relevance where it makes one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tyro

from smopd.data.places import how_to_fetch
from smopd.evals.bfcl import checker as bfcl_checker
from smopd.evals.bfcl import official as bfcl_official
from smopd.evals.bfcl.calls import Form, read_calls, write_calls
from smopd.evals.bfcl.checker import Answer, Call, Function
from smopd.evals.bfcl.metrics import (
    AST,
    COLUMNS,
    IRRELEVANCE,
    missing_parts,
    paper_rows,
    parse_categories,
    summarise,
)
from smopd.evals.bfcl.multi_turn import read_scores
from smopd.evals.bfcl.prompts import frame, messages
from smopd.evals.bfcl.truths import mended, perfect_calls
from smopd.evals.bfcl.types import TYPES, language_of
from smopd.evals.options import GROUND_TRUTH, Evaluation
from smopd.evals.suite import Column, Item, Scores

FILE = "BFCL_v4_{}.json"
ANSWERS = "possible_answer"

Scorer = Literal["auto", "ours", "bfcl-eval"]


@dataclass(frozen=True)
class Bfcl(Evaluation):
    """Score a model, or saved responses, on BFCL v4's single-turn categories: AST, relevance, Overall.

    `data` is the folder of BFCL_v4_*.json with possible_answer/ in it, or one of these files.
    """

    default_data: ClassVar[str] = "bfcl"

    categories: tuple[str, ...] = ("all",)
    """Of all, ast, non_live, live, relevance, or single categories such as live_simple."""
    scorer: Scorer = "auto"
    """What checks the calls: our own checker or the package bfcl-eval; auto takes the package where it is."""
    form: Form = "rlla"
    """How items are asked and answers read: as RLLA models do, or BFCL's list of Python calls."""
    words: Annotated[str | None, tyro.conf.arg(metavar="FILE|bfcl-eval")] = None
    """Ask in the words of a file of RLLA items (rlla), or of the package bfcl-eval (bfcl), not in ours."""
    underscores: bool = False
    """Show a function a.b as a_b, for models whose names know no dots."""
    mend: bool | None = None
    """Mend the six answers of BFCL v4 that no response could meet; without, those items count as wrong, as
    they do under bfcl-eval. Where nothing is said, only for --responses ground-truth."""
    multi_turn_scores: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """A folder of bfcl-eval's score files, from which Overall takes the multi-turn and agentic parts."""

    def suite(self) -> BfclSuite:
        return BfclSuite.load(
            self.data_path,
            categories=self.categories,
            scorer=self.scorer,
            form=self.form,
            words=self.words,
            underscores=self.underscores,
            mend=self.responses == GROUND_TRUTH if self.mend is None else self.mend,
            multi_turn_scores=self.multi_turn_scores,
        )

    def settings(self, suite: Any) -> dict[str, Any]:
        """The scorer that was used and how items were asked."""
        return {
            "scorer": suite.scorer,
            "form": self.form,
            "words": self.words,
            "underscores": self.underscores,
            "categories": list(suite.categories),
            "mended": list(suite.mended),
        }

    def notes(self, suite: Any, summary: Mapping[str, float | None]) -> list[str]:
        """What Overall counts as 0, and which answers are not BFCL's own."""
        missing = missing_parts(summary)
        notes = [f"Overall counts as 0 what did not run: {', '.join(missing)}"] if missing else []
        if suite.mended:
            keys = ", ".join(suite.mended)
            notes.append(f"answers mended, so that a response can meet them (not BFCL's own): {keys}")
        return notes


class BfclSuite:
    """The suite; `load` makes it of BFCL's files."""

    name = "bfcl"
    title = "BFCL v4"
    columns: Sequence[Column] = COLUMNS

    def __init__(
        self,
        items: Sequence[Item],
        functions: Sequence[Sequence[Function]],
        *,
        scorer: Scorer = "auto",
        form: Form = "rlla",
        underscores: bool = False,
        mended: Sequence[str] = (),
        more: Mapping[str, float] | None = None,
    ) -> None:
        """
        Args:
            functions: of each item.
            mended: keys of the items whose answers were.
            more: accuracies of categories that are not among the items, by name.
        Raises:
            ValueError: the scorer bfcl-eval is asked for and not installed.
        """
        if scorer == "bfcl-eval" and not bfcl_official.is_installed():
            raise ValueError("--scorer bfcl-eval: not installed, expected `pip install --no-deps bfcl-eval`")
        if scorer == "auto":
            scorer = "bfcl-eval" if bfcl_official.is_installed() else "ours"
        self.items: Sequence[Item] = tuple(items)
        self.scorer, self.form, self.underscores = scorer, form, underscores
        self.mended = tuple(mended)
        self.categories = tuple(dict.fromkeys(item.group for item in self.items))
        self._functions, self._more = tuple(functions), dict(more or {})

    @classmethod
    def load(
        cls,
        data: Path,
        *,
        categories: Sequence[str] = ("all",),
        scorer: Scorer = "auto",
        form: Form = "rlla",
        words: str | None = None,
        underscores: bool = False,
        mend: bool = False,
        multi_turn_scores: Path | None = None,
    ) -> BfclSuite:
        """The items of a folder, or of one category's file in it; other arguments as in `Bfcl`.

        Raises:
            ValueError, FileNotFoundError: for every mistake in the arguments and the files.
        """
        data, chosen = _chosen(data, parse_categories(categories))
        asked = frame(form, words)
        more = read_scores(multi_turn_scores) if multi_turn_scores is not None else {}
        items, functions, mended_keys = [], [], []
        for category in chosen:
            for row, answers in _rows(data, category):
                better = mended(row["function"], answers, category) if mend and answers else None
                if better is not None:
                    answers = better
                    mended_keys.append(row["id"])
                chat = messages(
                    row["question"][0], row["function"], category, form, asked, underscores=underscores
                )
                items.append(Item(row["id"], category, chat, answers))
                functions.append(row["function"])
        return cls(
            items,
            functions,
            scorer=scorer,
            form=form,
            underscores=underscores,
            mended=mended_keys,
            more=more,
        )

    def only(self, indices: Sequence[int]) -> BfclSuite:
        items = [self.items[i] for i in indices]
        keys = {item.key for item in items}
        return BfclSuite(
            items,
            [self._functions[i] for i in indices],
            scorer=self.scorer,
            form=self.form,
            underscores=self.underscores,
            mended=[key for key in self.mended if key in keys],
            more=self._more,
        )

    def score(self, responses: Sequence[str]) -> list[Scores]:
        """`correct`, the number of `calls` (None where they cannot be read), and the first `mistake`."""
        if len(responses) != len(self.items):
            raise ValueError(f"bfcl: expected {len(self.items)} responses, got {len(responses)}")
        return [
            self._score(item, functions, response)
            for item, functions, response in zip(self.items, self._functions, responses, strict=True)
        ]

    def _score(self, item: Item, functions: Sequence[Function], response: str) -> Scores:
        calls: list[Call] | None
        try:
            calls, mistake = read_calls(response, self.form, language_of(item.group)), None
        except ValueError as error:
            calls, mistake = None, f"unreadable: {error}"
        if item.group in IRRELEVANCE:
            mistake = "count: a call, expected none" if calls else None
        elif item.group not in AST:
            mistake = None if calls else mistake or "count: no call, expected one"
        elif calls is not None:
            checker = bfcl_official if self.scorer == "bfcl-eval" else bfcl_checker
            mistake = checker.find_mistake(
                functions, calls, item.truth, item.group, underscores=self.underscores
            )
        return {
            "correct": mistake is None,
            "calls": None if calls is None else len(calls),
            "mistake": mistake,
        }

    def summary(self, groups: Sequence[str], scores: Sequence[Scores]) -> dict[str, float | None]:
        """Accuracies and the means of them, as fractions; see evals/bfcl/metrics.py."""
        right = Counter(group for group, score in zip(groups, scores, strict=True) if score["correct"])
        return summarise(
            {**self._more, **{group: right[group] / count for group, count in Counter(groups).items()}}
        )

    def truths(self) -> list[str]:
        """Perfect responses: what is allowed; in irrelevance no call, in relevance any."""
        return [
            write_calls(self._perfect(item, functions), self.form, language_of(item.group))
            for item, functions in zip(self.items, self._functions, strict=True)
        ]

    def _perfect(self, item: Item, functions: Sequence[Function]) -> list[Call]:
        if item.group in AST:
            return perfect_calls(functions, item.truth, item.group, underscores=self.underscores)
        return [] if item.group in IRRELEVANCE else [Call(functions[0]["name"], {})]

    def paper(self) -> Mapping[str, Mapping[str, float]]:
        """Tables tab:bfcl_full_ext, tab:acc_format_moderate and tab:gate_rlla."""
        return paper_rows()


def _chosen(data: Path, categories: tuple[str, ...]) -> tuple[Path, tuple[str, ...]]:
    """The folder, and of the categories those whose files are given with it: all, or the one of a file."""
    if not data.is_file():
        return data, categories
    named = [category for category in categories if FILE.format(category) == data.name]
    if not named:
        raise ValueError(
            f"BFCL data {data}: expected a folder, or {FILE.format('CATEGORY')} of {', '.join(categories)}"
        )
    return data.parent, tuple(named)


def _rows(data: Path, category: str) -> list[tuple[dict[str, Any], list[Answer] | None]]:
    """The rows of a category, each with its answers, or None where it has none."""
    name = FILE.format(category)
    rows = _lines(data / name, ("id", "question", "function"))
    if category not in AST:
        return [(row, None) for row in rows]
    answers = {
        row["id"]: row["ground_truth"] for row in _lines(data / ANSWERS / name, ("id", "ground_truth"))
    }
    for row in rows:
        if row["id"] not in answers:
            raise ValueError(f"{data / ANSWERS / name}: has no answer to {row['id']}")
        _check(f"{data / name}: {row['id']}", row["function"], answers[row["id"]], category)
    return [(row, answers[row["id"]]) for row in rows]


def _check(where: str, functions: Sequence[Function], answers: Sequence[Answer], category: str) -> None:
    """Raises ValueError where the checker could not be run on an item."""
    types, described = TYPES[language_of(category)], {function["name"]: function for function in functions}
    for name in (name for answer in answers for name in answer):
        if name not in described:
            raise ValueError(f"{where}: the answer calls {name}, expected of {', '.join(described)}")
        for parameter, declared in described[name]["parameters"]["properties"].items():
            if declared.get("type") not in types:
                kind = declared.get("type")
                raise ValueError(f"{where}: {parameter} has type {kind!r}, expected of {', '.join(types)}")


def _lines(path: Path, keys: Sequence[str]) -> list[dict[str, Any]]:
    if not path.is_file():
        raise FileNotFoundError(
            f"BFCL data {path}: no such file, expected the folder of BFCL v4's files{how_to_fetch(path)}"
        )
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}: line {number}: {error}") from None
        if not isinstance(row, dict) or any(key not in row for key in keys):
            got = sorted(row) if isinstance(row, dict) else type(row).__name__
            raise ValueError(f"{path}: line {number}: expected {', '.join(keys)}, got {got}")
        rows.append(row)
    if not rows:
        raise ValueError(f"{path}: has no item")
    return rows
