"""BFCL v4's categories and what is made of their accuracies, and the paper's values.

Means and weights are BFCL's: Simple is the mean over languages, non-live the mean of its four kinds, live
the mean weighted by the numbers of items, irrelevance the mean of both sets. AST, the mean of non-live and
live, is the paper's. A mean of which a part did not run is None; only Overall counts such a part as 0, as
BFCL does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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


_METHODS = (
    "GRPO Baseline",
    "GDPO Baseline",
    "GD2PO Baseline",
    "Accuracy Teacher [0.9,0.1]",
    "Format Teacher [0.1,0.9]",
    "SMOPD",
    "SMOPD seq gate",
    "SMOPD token gate",
)
# Table tab:bfcl_full_ext as printed, in percent, in the order of COLUMNS.
_PRINTED = {
    "Qwen2.5-1.5B": """
        68.6 76.90 67.58 83.50 82.00 74.50 60.33 70.16 58.21 56.25 50.00 0.00 100.00 35.93 17.32
        72.6 80.60 70.92 88.00 85.00 78.50 64.54 74.81 62.49 56.25 50.00 0.00 100.00 35.27 18.04
        73.3 80.35 71.92 88.50 82.00 79.00 66.32 74.81 64.58 56.25 58.33 0.00 100.00 35.15 18.18
        70.5 78.83 70.83 87.50 81.00 76.00 62.10 72.09 59.73 56.25 62.50 0.00 100.00 37.44 17.84
        70.5 76.92 69.17 85.50 79.50 73.50 64.03 73.26 62.01 56.25 58.33 0.00 100.00 15.72 15.67
        70.7 78.31 71.25 88.50 79.00 74.50 63.06 72.09 61.06 56.25 58.33 0.00 93.75 23.65 16.50
        70.9 78.23 70.92 88.50 78.00 75.50 63.58 71.32 61.92 56.25 58.33 0.00 100.00 21.02 16.28
        70.9 78.08 71.33 88.50 78.00 74.50 63.66 74.03 61.54 50.00 54.17 0.00 100.00 20.02 16.18
    """,
    "Qwen2.5-3B": """
        75.8 83.00 73.50 91.50 85.00 82.00 68.54 63.18 70.28 68.75 50.00 0.00 81.25 79.50 23.10
        75.3 80.56 71.25 91.00 82.50 77.50 70.02 65.89 71.04 75.00 66.67 0.00 87.50 76.80 22.74
        76.5 82.69 73.75 92.50 84.00 80.50 70.32 67.83 71.04 75.00 62.50 0.00 81.25 75.57 22.86
        77.2 82.83 74.33 92.00 81.50 83.50 71.58 69.77 72.17 75.00 62.50 0.00 87.50 62.78 21.72
        76.1 83.15 74.08 92.00 84.50 82.00 69.06 64.34 70.47 75.00 54.17 0.00 81.25 76.86 22.91
        77.2 83.15 73.58 92.50 84.50 82.00 71.21 68.60 72.08 75.00 58.33 0.00 87.50 73.42 22.78
        77.3 83.71 73.83 93.00 84.50 83.50 70.84 66.67 72.17 68.75 58.33 0.00 93.75 73.23 22.78
        76.2 82.52 73.58 92.50 82.50 81.50 69.95 66.67 71.13 62.50 58.33 0.00 87.50 74.93 22.74
    """,
}


# Of the moderate teachers, tables tab:acc_format_moderate and tab:gate_rlla give the first column alone.
_MODERATE = {
    "Accuracy Teacher [0.7,0.3]": 76.4,
    "Format Teacher [0.3,0.7]": 73.4,
    "SMOPD": 76.9,
    "SMOPD seq gate": 76.6,
    "SMOPD token gate": 77.1,
}


def paper_rows() -> dict[str, dict[str, float]]:
    """The paper's rows as fractions: `Qwen2.5-3B SMOPD` -> column key -> value."""
    rows = {}
    for backbone, printed in _PRINTED.items():
        for method, line in zip(_METHODS, printed.strip().splitlines(), strict=True):
            values = [float(value) / 100 for value in line.split()]
            rows[f"{backbone} {method}"] = dict(zip((column.key for column in COLUMNS), values, strict=True))
    return rows | {
        f"Qwen2.5-3B moderate: {method}": {COLUMNS[0].key: value / 100} for method, value in _MODERATE.items()
    }
