"""BFCL v4, single turn: the 2,501 AST items and the relevance sets.

The data and the AST checker come from the package bfcl-eval. As in BFCL, an irrelevance item is correct if
the response has no readable call. A live_relevance item is correct if the response has one. Responses with
unreadable calls are also counted. The paper reports AST, which is the mean of non-live and live. BFCL defines
the other means.
"""

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import tyro

from smopd.data.sources import JsonLines
from smopd.evals.bfcl.official import Answer, Function, find_mistake, folder
from smopd.evals.bfcl.rlla_form import messages, read_calls
from smopd.evals.suite import Column, Evaluation, Item, Scores, Suite

SIMPLE = ("simple_python", "simple_java", "simple_javascript")
NON_LIVE = (*SIMPLE, "multiple", "parallel", "parallel_multiple")
LIVE_ITEMS = {"live_simple": 258, "live_multiple": 1053, "live_parallel": 16, "live_parallel_multiple": 24}
AST = (*NON_LIVE, *LIVE_ITEMS)
IRRELEVANCE = ("irrelevance", "live_irrelevance")
RELEVANCE = (*IRRELEVANCE, "live_relevance")
CATEGORIES = (*AST, *RELEVANCE)
MULTI_TURN = tuple(f"multi_turn_{kind}" for kind in ("base", "miss_func", "miss_param", "long_context"))
WEB_SEARCH = ("web_search_base", "web_search_no_snippet")
MEMORY = ("memory_kv", "memory_vector", "memory_rec_sum")
OVERALL: dict[str, tuple[float, str, Collection[str]]] = {  # part -> weight, name and categories
    "non_live": (0.1, "Non-Live", NON_LIVE),
    "live": (0.1, "Live", LIVE_ITEMS),
    "irrelevance_all": (0.1, "Irrelevance", IRRELEVANCE),
    "multi_turn": (0.3, "Multi-Turn", MULTI_TURN),
    "agentic": (0.4, "Agentic", (*WEB_SEARCH, *MEMORY)),
}

_KINDS = {"simple": "Simp", "multiple": "Mult", "parallel": "Par", "parallel_multiple": "P.M."}
_HEADINGS = {"ast": "AST (ours)", "non_live": "Non-Live Acc", **_KINDS, "live": "Live Acc"}
_HEADINGS |= {f"live_{kind}": heading for kind, heading in _KINDS.items()}
_HEADINGS |= {"multi_turn": "Multi Turn", "live_relevance": "Rel"}
_HEADINGS |= {"irrelevance_all": "Irrel", "overall": "Overall"}
COLUMNS = tuple(
    Column(key, heading, scale=100, digits=1 if key == "ast" else 2) for key, heading in _HEADINGS.items()
)


@dataclass(frozen=True)
class BfclItem(Item):
    """An item with the functions that its response may call."""

    functions: Sequence[Function] = ()


class BfclSuite(Suite):
    """The single-turn categories. `more` has the accuracies of other categories, which count in Overall."""

    name = "bfcl"
    title = "BFCL v4"
    columns: Sequence[Column] = COLUMNS
    items: Sequence[BfclItem]

    def __init__(self, items: Sequence[BfclItem], more: Mapping[str, float] | None = None) -> None:
        self.items = items
        self.more = more or {}

    def score(self, responses: Sequence[str]) -> list[Scores]:
        """Return for each response `correct`, `calls` (their number, or None if unreadable) and `mistake`."""
        return [self._score(item, response) for item, response in zip(self.items, responses, strict=True)]

    def _score(self, item: BfclItem, response: str) -> Scores:
        try:
            calls = read_calls(response)
        except ValueError as error:
            correct = item.group in IRRELEVANCE
            return {"correct": correct, "calls": None, "mistake": f"unreadable: {error}"}
        mistake = None
        if item.group in AST:
            mistake = find_mistake(item.functions, calls, item.truth, item.group)
        elif bool(calls) == (item.group in IRRELEVANCE):
            mistake = "got a call, expected none" if calls else "got no call, expected one"
        return {"correct": mistake is None, "calls": len(calls), "mistake": mistake}

    def summary(self, groups: Sequence[str], scores: Sequence[Scores]) -> dict[str, float | None]:
        """Return the accuracies and their means as fractions, and the counts of `unreadable` responses."""
        right, unreadable = Counter[str](), Counter[str]()
        for group, score in zip(groups, scores, strict=True):
            right[group] += score["correct"]
            unreadable[group] += score["calls"] is None
        accuracies = {group: right[group] / count for group, count in Counter(groups).items()}
        counts: dict[str, float | None] = {f"unreadable/{group}": n for group, n in unreadable.items()}
        return summarise({**self.more, **accuracies}) | {"unreadable": unreadable.total()} | counts


@dataclass(frozen=True)
class Bfcl(Evaluation):
    """Score a model, or saved responses, on BFCL v4's single-turn categories: AST, relevance, Overall.

    The items come from the installed package bfcl-eval, or from `data`, a folder of BFCL_v4_*.json files with
    a subfolder possible_answer/.
    """

    default_data: ClassVar[str] = "bfcl-eval"

    categories: tuple[str, ...] = CATEGORIES
    """Categories to run."""
    multi_turn_scores: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """Folder of bfcl-eval's score files, for the multi-turn and agentic parts of Overall."""

    @property
    def data_path(self) -> Path:
        return folder() / "data" if self.data is None else self.data.expanduser()

    def suite(self) -> BfclSuite:
        folder()  # report a missing package first
        if unknown := [name for name in self.categories if name not in CATEGORIES]:
            raise ValueError(f"--categories: got {unknown[0]!r}, expected some of {', '.join(CATEGORIES)}")
        more = read_scores(self.multi_turn_scores.expanduser()) if self.multi_turn_scores else {}
        chosen = [category for category in CATEGORIES if category in self.categories]
        return BfclSuite(load_items(self.data_path, chosen), more)

    def settings(self, suite: Any) -> dict[str, Any]:
        categories = list(dict.fromkeys(item.group for item in suite.items))
        return {"bfcl_eval": version("bfcl-eval"), "categories": categories}

    def notes(self, suite: Any, summary: Mapping[str, float | None]) -> list[str]:
        shares = {group: summary[group] for group in dict.fromkeys(item.group for item in suite.items)}
        found = {group: share for group, share in shares.items() if share is not None}
        notes = [", ".join(f"{group} {100 * share:.2f}" for group, share in found.items())]
        if missing := missing_parts(summary):
            notes.append(f"not run, counted as 0 in Overall: {', '.join(missing)}")
        if tried := sum(summary.get(f"unreadable/{group}") or 0 for group in RELEVANCE):
            notes.append(
                f"{tried:.0f} responses to the relevance sets have an unreadable call; "
                "BFCL counts them as no call"
            )
        return notes


def load_items(data: Path, categories: Sequence[str]) -> list[BfclItem]:
    """Load the items of the categories from a folder of BFCL's files."""
    items = []
    for category in categories:
        path = data / f"BFCL_v4_{category}.json"
        answer_path = data / "possible_answer" / path.name
        try:
            answers: dict[str, list[Answer]] = {}
            if category in AST:
                answers = {row["id"]: row["ground_truth"] for row in JsonLines([answer_path])}
            for row in JsonLines([path]):
                truth = answers[row["id"]] if category in AST else None
                chat = messages(row["question"][0], row["function"], category)
                items.append(BfclItem(row["id"], category, chat, truth, row["function"]))
        except KeyError as error:
            raise ValueError(f"{path}: a row here or in possible_answer has no {error}") from None
    return items


def summarise(accuracies: Mapping[str, float]) -> dict[str, float | None]:
    """Return the accuracies by category and all means. A mean is None if one of its parts is missing.

    Simple is the mean over languages, non-live over its four kinds, and live over its items. In Overall, a
    missing part counts as 0.
    """
    found: dict[str, float | None] = dict.fromkeys((*CATEGORIES, "overall")) | dict(accuracies)

    def mean(*names: str, weights: Sequence[float] | None = None) -> float | None:
        values = [found.get(name) for name in names]
        known = [value for value in values if value is not None]
        return float(np.average(known, weights=weights)) if len(known) == len(values) else None

    found["simple"] = mean(*SIMPLE)
    found["non_live"] = mean(*_KINDS)
    found["live"] = mean(*LIVE_ITEMS, weights=list(LIVE_ITEMS.values()))
    found["ast"] = mean("non_live", "live")
    found["irrelevance_all"] = mean(*IRRELEVANCE)
    found["multi_turn"] = mean(*MULTI_TURN)
    found["web_search"] = mean(*WEB_SEARCH)
    found["memory"] = mean(*MEMORY)
    found["agentic"] = mean("web_search", "memory")
    parts = {part: found[part] for part in OVERALL}
    if any(value is not None for value in parts.values()):
        found["overall"] = sum(OVERALL[part][0] * (value or 0.0) for part, value in parts.items())
    return found


def missing_parts(summary: Mapping[str, float | None]) -> list[str]:
    """Return the incomplete parts of Overall. If only some categories are missing, the part lists them."""
    missing = []
    for part, (_, name, categories) in OVERALL.items():
        absent = [category for category in categories if summary.get(category) is None]
        if summary.get(part) is None:
            some = 0 < len(absent) < len(categories)
            missing.append(f"{name} ({', '.join(absent)})" if some else name)
    return missing


def read_scores(folder: Path) -> dict[str, float]:
    """Return multi-turn and agentic accuracies by category from a folder of bfcl-eval's score files."""
    found: dict[str, float] = {}
    for category in (*MULTI_TURN, *WEB_SEARCH, *MEMORY):
        paths = list(folder.rglob(f"BFCL_v4_{category}_score.json"))
        if len(paths) > 1:
            raise ValueError(f"scores {folder}: has {category} twice, expected the scores of one model")
        for path in paths:
            with path.open(encoding="utf-8") as lines:
                try:
                    found[category] = float(json.loads(next(lines, "null"))["accuracy"])
                except (ValueError, TypeError, KeyError):
                    raise ValueError(f"{path}: line 1: expected an object with `accuracy`") from None
    if not found:
        raise ValueError(f"scores {folder}: has no BFCL_v4_multi_turn_*_score.json or agentic one")
    return found
