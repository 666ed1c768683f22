"""API-Bank: 597 dialogues, scored by exact match and optionally by a judge.

A response is an exact match if it contains every true call, with the same name and parameters.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from smopd.data.sources import load_rows
from smopd.evals.api_bank.judge import KINDS, Judge, JudgeSettings
from smopd.evals.responses import is_call, read_json
from smopd.evals.rlla import TOOL_THINK
from smopd.evals.suite import Column, Evaluation, Item, Scores, Suite, group_files
from smopd.rewards.rlla import MAX_BLOCK_CHARS

Parser = Literal["first", "last", "published"]
"""How calls are parsed.

first: read the first tool_call block, if both tags occur. last: read the last block, or bare JSON. published:
follow GD2PO's scripts with ToolRL's matcher. They read from the first opening tag to the next closing tag.
They also accept a call in a JSON string, and the true parameters alone. They find no calls in a response with
a number instead of a call.
"""
Outcome = Literal["exact", "wrong_arguments", "wrong_tool", "no_call"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
LEVELS = ("L1", "L2", "L3")
FILES = {f"L{level}": f"level-{level}-api_processed.json" for level in (1, 2, 3)}
TABLES: tuple[tuple[str, str, str, str, Sequence[str]], ...] = (
    ("", "overall", "exact", "outcome", OUTCOMES),
    ("judge_", "average", "correct", "verdict", KINDS),
)
"""Per table: prefix of its keys, key of its total, name of the pass score, name of the kind, all kinds."""
ApiCall = dict[str, Any]


def columns_of(parser: Parser, judged: bool) -> tuple[Column, ...]:
    """Return the columns. The headings of exact matches name the parser."""
    headings = {level: f"Exact {level} (%, {parser})" for level in LEVELS}
    headings["overall"] = f"Exact Overall (%, {parser})"
    if judged:
        headings |= {f"judge_{level}": f"Judge {level} (%)" for level in LEVELS}
        headings["judge_average"] = "Judge Avg (%)"
    return tuple(Column(key, heading, scale=100, digits=2) for key, heading in headings.items())


def outcome(response_text: str, true_calls: Sequence[ApiCall], *, parser: Parser = "first") -> Outcome:
    """Classify a response as exact match, wrong arguments, wrong tool or no call."""
    calls = read_calls(response_text, parser)
    if all(any(_equal(call, true) for call in calls) for true in true_calls):
        return "exact"
    if not calls:
        return "no_call"
    names = [true["name"] for true in true_calls]
    return "wrong_arguments" if any(call.get("name") in names for call in calls) else "wrong_tool"


def read_calls(response_text: str, parser: Parser = "first") -> list[ApiCall]:
    """Return the calls of a response. Each is a JSON object on its own line. Other lines are skipped."""
    if parser == "last":
        block = response_text.rsplit("<tool_call>", 1)[-1]
    elif "<tool_call>" in response_text and "</tool_call>" in response_text:
        block = response_text.split("<tool_call>", 1 if parser == "published" else 2)[1]
    else:
        return []
    block = block.split("</tool_call>", 1)[0].strip()
    if len(block) > MAX_BLOCK_CHARS:
        return []
    read = [read_json(line) for line in block.split("\n")]
    if parser == "published":
        read = [read_json(each) if isinstance(each, str) else each for each in read]
        if any(isinstance(each, int | float) for each in read):
            return []
    calls = [call for call in read if isinstance(call, dict)]
    return [call for call in calls if parser == "published" or isinstance(call.get("name"), str)]


def _equal(call: ApiCall, true: ApiCall) -> bool:
    """Return whether two calls are equal. A call from the published parser may be the parameters alone."""
    if "name" not in call and "parameters" not in call:
        return call == true["parameters"]
    return call.get("name") == true["name"] and call.get("parameters") == true["parameters"]


def load_items(data: Path) -> list[Item]:
    """Load all levels from a folder, or one level from its file. Keys are LEVEL-ROW, as L1-8 in the paper."""
    items = []
    for level, path in group_files(data, FILES, "API-Bank data").items():
        for index, row in enumerate(load_rows(str(path))):
            answer = row.get("answer")
            calls = answer if isinstance(answer, list) else [answer]
            texts: dict[str, Any] = {role: row.get(role) for role in ("system", "user")}
            good = calls and all(isinstance(text, str) for text in texts.values())
            if not good or not all(map(is_call, calls)):
                expected = "strings `system` and `user`, and calls as `answer`, with `name` and `parameters`"
                raise ValueError(f"{path}: row {index}: expected {expected}; got {str(row)[:200]}")
            messages = tuple({"role": role, "content": text} for role, text in texts.items())
            items.append(Item(f"{level}-{index}", level, messages, calls))
    return items


class ApiBank(Suite):
    """Exact matches, and optionally a judge's verdicts on the other responses."""

    name = "api_bank"
    title = "API-Bank"

    def __init__(self, items: Sequence[Item], parser: Parser = "first", judge: Judge | None = None):
        self.items = items
        self.columns: Sequence[Column] = columns_of(parser, judge is not None)
        self.parser: Parser = parser
        self.judge = judge

    def score(self, responses: Sequence[str]) -> list[Scores]:
        scores: list[dict[str, Any]] = []
        for response, item in zip(responses, self.items, strict=True):
            found = outcome(response, item.truth, parser=self.parser)
            scores.append({"exact": found == "exact", "outcome": found})
        if self.judge is None:
            return list(scores)
        requests = {}
        for i, (item, score) in enumerate(zip(self.items, scores, strict=True)):
            score |= {"verdict": None, "correct": score["exact"], "judge_said": None}
            if not score["exact"]:
                predicted = _lines(read_calls(responses[i], self.parser))
                requests[i] = self.judge.request(item.messages[-1]["content"], _lines(item.truth), predicted)
        for i, (kind, text) in zip(requests, self.judge.verdicts([*requests.values()]), strict=True):
            correct = None if kind == "failed" else kind == "yes"
            scores[i] |= {"verdict": kind, "correct": correct, "judge_said": text}
        return list(scores)

    def summary(self, groups: Sequence[str], scores: Sequence[Scores]) -> dict[str, float | None]:
        """Return the columns, and counts of each outcome and verdict, in total and per level."""
        parts = {level: [s for g, s in zip(groups, scores, strict=True) if g == level] for level in LEVELS}
        found: dict[str, float | None] = {}
        for prefix, every, passed, kind, kinds in TABLES if self.judge is not None else TABLES[:1]:
            for level, part in {**parts, every: scores}.items():
                right = sum(bool(score[passed]) for score in part)
                found[prefix + level] = right / len(part) if part else None
                for name in kinds:
                    key = prefix + name if level == every else f"{prefix}{name}/{level}"
                    found[key] = sum(score[kind] == name for score in part)
        return found

    def truths(self) -> list[str]:
        return [f"{TOOL_THINK}\n<tool_call>\n{_lines(item.truth)}\n</tool_call>" for item in self.items]


def _lines(calls: Sequence[ApiCall]) -> str:
    return "\n".join(json.dumps(call, ensure_ascii=False) for call in calls)


@dataclass(frozen=True)
class ApiBankEvaluation(Evaluation):
    """Score a model, or saved responses, on API-Bank by exact match per level, and optionally by a judge.

    Writes api_bank.json (the scores) and api_bank_items.jsonl (each response with its truth and outcome).
    """

    default_data: ClassVar[str] = "api_bank"

    parser: Parser = "first"
    """How calls are parsed. first: the first tool_call block, if both tags occur. last: the last block, or
    bare JSON. published: as in the published scorer."""
    judge: JudgeSettings = field(default_factory=JudgeSettings)

    def suite(self) -> ApiBank:
        self.judge.check()
        items = load_items(self.data_path)
        judge = Judge(self.judge, self.output / "judge_cache") if self.judge.url is not None else None
        return ApiBank(items, self.parser, judge)

    def settings(self, suite: ApiBank) -> dict[str, Any]:
        if suite.judge is None:
            return {"parser": suite.parser}
        counts = {"asked": suite.judge.asked, "cached": suite.judge.cached}
        return {"parser": suite.parser, "judge": asdict(self.judge) | counts}

    def notes(self, suite: ApiBank, summary: Mapping[str, float | None]) -> list[str]:
        def counted(key: str, name: str) -> str:
            levels = ", ".join(f"{level} {summary[f'{key}/{level}']:.0f}" for level in LEVELS)
            return f"{name.replace('_', ' ')} {summary[key]:.0f} ({levels})"

        failures = [counted(name, name) for name in OUTCOMES if name != "exact"]
        lines = ["failures of the exact match: " + "; ".join(failures)]
        if suite.judge is None:
            return lines
        kinds = [counted(f"judge_{kind}", kind) for kind in KINDS]
        lines.append(f"judge (asked {suite.judge.asked}, cached {suite.judge.cached}): " + "; ".join(kinds))
        if failed := summary["judge_failed"]:
            lines.append(
                f"{failed:.0f} failures have no verdict and count as not rescued: the judge's columns are "
                "lower bounds. Rerun to request only these; see `judge_said` in api_bank_items.jsonl."
            )
        return lines
