"""API-Bank: 597 dialogues that each ask for one tool call, scored by exact match and, if asked, by a judge.

A response passes where any of its calls has the true name and equals the true parameters, all of them. Calls
are read by `json.loads` under a size and a depth limit, never evaluated. The published scorer is a choice of
its own (`published`), and more lenient; a table's columns say which one made them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from smopd.evals.api_bank.judge import KINDS, Judge, JudgeSettings, Question
from smopd.evals.options import Evaluation, group_files, read_json
from smopd.evals.rlla import TOOL_THINK
from smopd.evals.suite import Column, Item, Scores, Suite
from smopd.rewards.rlla import MAX_BLOCK_CHARS

Parser = Literal["first", "last", "published"]
"""first: the first tool_call block, where both tags occur. last: the last block, or bare JSON. published: as
GD2PO's scripts with ToolRL's matcher: from the first opening tag to the next closing one, whatever opens
between; a JSON text of a call is one; a number in the place of a call fails the response; an object that is
the true parameters alone passes."""
Outcome = Literal["exact", "wrong_arguments", "wrong_tool", "no_call"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
LEVELS = ("L1", "L2", "L3")
FILES = {f"L{level}": f"level-{level}-api_processed.json" for level in (1, 2, 3)}


def exact_columns(parser: Parser) -> tuple[Column, ...]:
    return tuple(
        Column(key, f"Exact {heading} (%, {parser})", scale=100, digits=2)
        for key, heading in zip((*LEVELS, "overall"), (*LEVELS, "Overall"), strict=True)
    )


JUDGE_COLUMNS = tuple(
    Column(key, f"Judge {heading} (%)", scale=100, digits=2)
    for key, heading in zip(
        (*(f"judge_{level}" for level in LEVELS), "judge_average"), (*LEVELS, "Avg"), strict=True
    )
)
ApiCall = dict[str, Any]


def outcome(response_text: str, answer: ApiCall | Sequence[ApiCall], *, parser: Parser = "first") -> Outcome:
    """What came of a response: an exact match, or the class of its failure.

    `wrong_arguments` is a failure that calls a right tool, `wrong_tool` one whose calls are all of others.
    """
    true_calls = read_answer(answer)
    calls = read_calls(response_text, parser)
    equal = _equal_or_bare if parser == "published" else _equal
    if all(any(equal(call, true) for call in calls) for true in true_calls):
        return "exact"
    if not calls:
        return "no_call"
    names = [true["name"] for true in true_calls]
    return "wrong_arguments" if any(call.get("name") in names for call in calls) else "wrong_tool"


def read_calls(response_text: str, parser: Parser = "first") -> list[ApiCall]:
    """The calls of a response, one JSON object with a text as `name` a line; other lines are passed over.

    The published scorer's may have no name.
    """
    if parser != "last":
        if "<tool_call>" not in response_text or "</tool_call>" not in response_text:
            return []
        block = response_text.split("<tool_call>", 1 if parser == "published" else 2)[1]
    else:
        block = response_text.rsplit("<tool_call>", 1)[-1]
    block = block.split("</tool_call>", 1)[0].strip()
    if len(block) > MAX_BLOCK_CHARS:
        return []
    read = [read_json(line) for line in block.split("\n")]
    if parser == "published":
        read = [read_json(each) if isinstance(each, str) else each for each in read]
        if any(isinstance(each, int | float) for each in read):
            return []
        return [call for call in read if isinstance(call, dict)]
    return [call for call in read if isinstance(call, dict) and isinstance(call.get("name"), str)]


def read_answer(answer: ApiCall | Sequence[ApiCall]) -> list[ApiCall]:
    """The true calls of an item, whose file has a list of them or a single one."""
    calls = [answer] if isinstance(answer, Mapping) else answer
    if not isinstance(calls, Sequence) or not calls or not all(_is_call(call) for call in calls):
        raise ValueError(
            f"expected an answer of one or more calls, each with `name` and an object as `parameters`, "
            f"got {str(answer)[:200]!r}"
        )
    return [dict(call) for call in calls]


def load_items(data: Path) -> list[Item]:
    """The items of the three levels' files in a folder, or of one of them, in order.

    Keys are as the paper's L1-8, from 0.

    Raises:
        FileNotFoundError, ValueError: a file is missing, no JSON list, or has a malformed row.
    """
    items = []
    for level, path in group_files(data, FILES, "API-Bank data").items():
        try:
            rows = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        if not isinstance(rows, list) or not rows:
            raise ValueError(f"{path}: expected a list of items, got {str(rows)[:60]!r}")
        items += [_item(row, level, index, path) for index, row in enumerate(rows)]
    return items


class ApiBank(Suite):
    """Exact matches, and with a judge what it rescues of the others.

    The paper's rows are those of tables tab:apibank_exact and tab:acc_format.

    Args:
        items: of `load_items`.
        parser: how calls are read.
        judge: asked about each failure of the exact match.
    """

    name = "api_bank"
    title = "API-Bank"

    def __init__(self, items: Sequence[Item], parser: Parser = "first", judge: Judge | None = None):
        self.items: Sequence[Item] = items
        self.columns: Sequence[Column] = exact_columns(parser) + (() if judge is None else JUDGE_COLUMNS)
        self.parser: Parser = parser
        self.judge = judge

    def score(self, responses: Sequence[str]) -> list[Scores]:
        outcomes = [
            outcome(response, item.truth, parser=self.parser)
            for response, item in zip(responses, self.items, strict=True)
        ]
        scores: list[dict[str, Any]] = [{"exact": each == "exact", "outcome": each} for each in outcomes]
        if self.judge is None:
            return list(scores)
        failures = [i for i, each in enumerate(outcomes) if each != "exact"]
        questions = [
            Question(
                dialogue=self.items[i].messages[-1]["content"],
                gold=_lines(read_answer(self.items[i].truth)),
                predicted=_lines(read_calls(responses[i], self.parser)),
            )
            for i in failures
        ]
        for score in scores:
            score |= {"verdict": None, "correct": score["exact"], "judge_said": None}
        for i, verdict in zip(failures, self.judge.verdicts(questions), strict=True):
            correct = None if verdict.kind == "failed" else verdict.kind == "yes"
            scores[i] |= {"verdict": verdict.kind, "correct": correct, "judge_said": verdict.text}
        return list(scores)

    def summary(self, groups: Sequence[str], scores: Sequence[Scores]) -> dict[str, float | None]:
        """The columns; counts of each outcome, and with a judge of each kind of verdict, in all and a level.

        A failure without a verdict counts as not rescued; `judge_failed` says how many there are.
        """
        n, result = Counter(groups), dict[str, float | None]()
        outcomes = Counter(zip(groups, map(itemgetter("outcome"), scores), strict=True))
        exact = {level: outcomes[level, "exact"] for level in LEVELS}
        result |= _shares(n, exact, "", "overall") | _counts("", OUTCOMES, outcomes)
        if self.judge is not None:
            verdicts = Counter(zip(groups, map(itemgetter("verdict"), scores), strict=True))
            correct = {level: exact[level] + verdicts[level, "yes"] for level in LEVELS}
            result |= _shares(n, correct, "judge_", "judge_average") | _counts("judge_", KINDS, verdicts)
        return result

    def truths(self) -> list[str]:
        return [
            f"{TOOL_THINK}\n<tool_call>\n{_lines(read_answer(item.truth))}\n</tool_call>"
            for item in self.items
        ]


def _shares(
    n: Mapping[str, int], passed: Mapping[str, int], prefix: str, all_items: str
) -> dict[str, float | None]:
    shares: dict[str, float | None] = {
        prefix + level: passed[level] / n[level] if n[level] else None for level in LEVELS
    }
    shares[all_items] = sum(passed.values()) / sum(n.values()) if n else None
    return shares


def _counts(
    prefix: str, names: Sequence[str], counted: Mapping[tuple[str, str], int]
) -> dict[str, float | None]:
    counts: dict[str, float | None] = {}
    for name in names:
        counts[prefix + name] = sum(counted[level, name] for level in LEVELS)
        counts |= {f"{prefix}{name}/{level}": counted[level, name] for level in LEVELS}
    return counts


def _item(row: Any, level: str, index: int, path: Path) -> Item:
    try:
        texts = [row.get(name) for name in ("system", "user")] if isinstance(row, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"expected the texts system and user, got {str(row)[:80]!r}")
        answer = read_answer(row.get("answer"))
    except ValueError as error:
        raise ValueError(f"{path}: row {index}: {error}") from None
    messages = ({"role": "system", "content": row["system"]}, {"role": "user", "content": row["user"]})
    return Item(f"{level}-{index}", level, messages, answer)


def _equal(call: ApiCall, true: ApiCall) -> bool:
    return call["name"] == true["name"] and call.get("parameters") == true["parameters"]


def _equal_or_bare(call: ApiCall, true: ApiCall) -> bool:
    """As ToolRL's matcher, which takes the true parameters for a call too."""
    if "name" not in call and "parameters" not in call:
        return call == true["parameters"]
    return call.get("name") == true["name"] and call.get("parameters") == true["parameters"]


def _is_call(call: object) -> bool:
    return (
        isinstance(call, Mapping)
        and isinstance(call.get("name"), str)
        and isinstance(call.get("parameters"), Mapping)
    )


def _lines(calls: Sequence[ApiCall]) -> str:
    return "\n".join(json.dumps(call, ensure_ascii=False) for call in calls)


@dataclass(frozen=True)
class ApiBankEvaluation(Evaluation):
    """Score a model, or saved responses, on API-Bank: exact match by level, and what a judge rescues.

    Writes api_bank.json (the scores) and api_bank_items.jsonl (each response with its truth and outcome).
    """

    default_data: ClassVar[str] = "api_bank"

    parser: Parser = "first"
    """How calls are read: the first tool_call block with both tags, the last one or bare JSON, or all as the
    published scorer does."""
    judge: JudgeSettings = field(default_factory=JudgeSettings)

    def suite(self) -> ApiBank:
        self.judge.check()
        items = load_items(self.data_path)
        judge = Judge(self.judge, self.output / "judge_cache") if self.judge.url is not None else None
        return ApiBank(items, self.parser, judge)

    def settings(self, suite: ApiBank) -> dict[str, Any]:
        kept: dict[str, Any] = {"parser": suite.parser}
        if suite.judge is not None:
            counts = {name: getattr(suite.judge, name) for name in ("asked", "cached", "sent")}
            kept["judge"] = asdict(self.judge) | {"cache": str(suite.judge.cache)} | counts
        return kept

    def notes(self, suite: ApiBank, summary: Mapping[str, float | None]) -> list[str]:
        failures = [_counted(summary, name, name) for name in OUTCOMES if name != "exact"]
        lines = ["failures of the exact match: " + "; ".join(failures)]
        if suite.judge is None:
            return lines
        kinds = [_counted(summary, f"judge_{kind}", kind) for kind in KINDS]
        lines.append(f"judge (asked {suite.judge.asked}, cached {suite.judge.cached}): " + "; ".join(kinds))
        if summary["judge_failed"]:
            lines.append(
                f"{summary['judge_failed']:.0f} failures have no verdict and count as not rescued: the "
                f"judge's columns are lower bounds. The same command asks for these alone. `judge_said` in "
                f"{suite.name}_items.jsonl has the reasons."
            )
        return lines


def _counted(summary: Mapping[str, float | None], key: str, name: str) -> str:
    levels = ", ".join(f"{level} {summary[f'{key}/{level}']:.0f}" for level in LEVELS)
    return f"{name.replace('_', ' ')} {summary[key]:.0f} ({levels})"
