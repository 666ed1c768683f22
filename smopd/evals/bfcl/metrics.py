"""BFCL v4's categories and the means of their accuracies.

Means and weights are BFCL's: Simple is the mean over languages, non-live the mean of its four kinds, live
the mean weighted by the numbers of items, irrelevance the mean of both sets. AST, the mean of non-live and
live, is the paper's. A mean of which a part did not run is None; only Overall counts such a part as 0, as
BFCL does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from smopd.evals.suite import Column

SIMPLE = ("simple_python", "simple_java", "simple_javascript")
NON_LIVE = (*SIMPLE, "multiple", "parallel", "parallel_multiple")
LIVE_ITEMS = {"live_simple": 258, "live_multiple": 1053, "live_parallel": 16, "live_parallel_multiple": 24}
AST = (*NON_LIVE, *LIVE_ITEMS)
IRRELEVANCE = ("irrelevance", "live_irrelevance")
RELEVANCE = (*IRRELEVANCE, "live_relevance")
CATEGORIES = (*AST, *RELEVANCE)
GROUPS = {
    "all": CATEGORIES,
    "ast": AST,
    "non_live": NON_LIVE,
    "live": tuple(LIVE_ITEMS),
    "relevance": RELEVANCE,
}
MULTI_TURN = tuple(f"multi_turn_{kind}" for kind in ("base", "miss_func", "miss_param", "long_context"))
WEB_SEARCH = ("web_search_base", "web_search_no_snippet")
MEMORY = ("memory_kv", "memory_vector", "memory_rec_sum")
OVERALL_WEIGHTS = {"non_live": 0.1, "live": 0.1, "irrelevance_all": 0.1, "multi_turn": 0.3, "agentic": 0.4}
NAMES = {
    "non_live": "Non-Live",
    "live": "Live",
    "irrelevance_all": "Irrelevance",
    "multi_turn": "Multi-Turn",
    "agentic": "Agentic",
}

_COLUMNS = (
    ("ast", "AST (ours)", 1),
    ("non_live", "Non-Live Acc", 2),
    ("simple", "Simp", 2),
    ("multiple", "Mult", 2),
    ("parallel", "Par", 2),
    ("parallel_multiple", "P.M.", 2),
    ("live", "Live Acc", 2),
    ("live_simple", "Simp", 2),
    ("live_multiple", "Mult", 2),
    ("live_parallel", "Par", 2),
    ("live_parallel_multiple", "P.M.", 2),
    ("multi_turn", "Multi Turn", 2),
    ("live_relevance", "Rel", 2),
    ("irrelevance_all", "Irrel", 2),
    ("overall", "Overall", 2),
)
_SCORE_FILE = re.compile(r"BFCL_v4_(\w+)_score\.json")
COLUMNS = tuple(Column(key, heading, 100.0, digits) for key, heading, digits in _COLUMNS)


def parse_categories(names: Sequence[str]) -> tuple[str, ...]:
    """Categories, and groups of them, by name -> categories in the table's order.

    Raises:
        ValueError: a name is neither.
    """
    chosen: set[str] = set()
    for name in names:
        if name not in CATEGORIES and name not in GROUPS:
            raise ValueError(f"categories: {name!r}, expected of {', '.join((*GROUPS, *CATEGORIES))}")
        chosen.update(GROUPS.get(name, (name,)))
    if not chosen:
        raise ValueError(f"categories: none, expected of {', '.join((*GROUPS, *CATEGORIES))}")
    return tuple(category for category in CATEGORIES if category in chosen)


def summarise(accuracies: Mapping[str, float]) -> dict[str, float | None]:
    """All means of the accuracies that there are, by category; the categories stand among them."""
    found: dict[str, float | None] = {name: accuracies.get(name) for name in CATEGORIES}
    found["simple"] = mean([found[name] for name in SIMPLE])
    found["non_live"] = mean(
        [found[name] for name in ("simple", "multiple", "parallel", "parallel_multiple")]
    )
    found["live"] = mean([found[name] for name in LIVE_ITEMS], list(LIVE_ITEMS.values()))
    found["ast"] = mean([found["non_live"], found["live"]])
    found["irrelevance_all"] = mean([found[name] for name in IRRELEVANCE])
    found["multi_turn"] = mean([accuracies.get(name) for name in MULTI_TURN])
    web, memory = ([accuracies.get(name) for name in names] for names in (WEB_SEARCH, MEMORY))
    found["agentic"] = mean([mean(web), mean(memory)])
    found["overall"] = overall(found)
    return found


def overall(parts: Mapping[str, float | None]) -> float | None:
    """0.1 (non-live + live + irrelevance) + 0.3 multi-turn + 0.4 agentic; what did not run counts as 0."""
    if all(parts.get(name) is None for name in OVERALL_WEIGHTS):
        return None
    return sum(weight * (parts.get(name) or 0.0) for name, weight in OVERALL_WEIGHTS.items())


def missing_parts(summary: Mapping[str, float | None]) -> list[str]:
    """The parts of Overall that did not run."""
    return [NAMES[name] for name in OVERALL_WEIGHTS if summary.get(name) is None]


def mean(values: Sequence[float | None], weights: Sequence[float] | None = None) -> float | None:
    """The weighted mean, or None where a value is missing."""
    known = [value for value in values if value is not None]
    if not values or len(known) < len(values):
        return None
    weights = [1.0] * len(known) if weights is None else weights
    return sum(value * weight for value, weight in zip(known, weights, strict=True)) / sum(weights)


def read_scores(folder: Path) -> dict[str, float]:
    """The multi-turn and agentic accuracies of a folder of bfcl-eval's score files, by category.

    Raises:
        ValueError, FileNotFoundError: no such folder, no score in it, two of one category, or another form.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"scores {folder}: no such folder, expected bfcl-eval's score folder")
    found: dict[str, float] = {}
    for path in sorted(folder.rglob("BFCL_v4_*_score.json")):
        match = _SCORE_FILE.fullmatch(path.name)
        if match is None or match[1] not in (*MULTI_TURN, *WEB_SEARCH, *MEMORY):
            continue
        if match[1] in found:
            raise ValueError(f"scores {folder}: has {match[1]} twice, expected the scores of one model")
        with path.open(encoding="utf-8") as lines:
            try:
                accuracy = float(json.loads(next(lines, "null"))["accuracy"])
            except (ValueError, TypeError, KeyError):
                accuracy = -1.0
        if not 0.0 <= accuracy <= 1.0:
            raise ValueError(f"{path}: line 1: expected an object with `accuracy` in 0 to 1")
        found[match[1]] = accuracy
    if not found:
        raise ValueError(f"scores {folder}: has no BFCL_v4_multi_turn_*_score.json or agentic one")
    return found
