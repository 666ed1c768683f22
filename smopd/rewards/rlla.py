"""The paper's rewards on RLLA, as in ToolRL: the format of a response and the accuracy of its tool calls.

`json.loads` parses tool calls, within limits of size and depth. Model output is never run as code.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

ACCURACY_RANGE = (-3.0, 3.0)  # ToolRL: R_correct in [-3, 3]
NO_CALL_REWARD = 0.0  # ToolRL: the ground truth has no tool call
MAX_BLOCK_CHARS = 65_536  # ours: far above the 1024 new tokens of every recipe
MAX_JSON_DEPTH = 64  # ours: far below the interpreter's recursion limit

_ASSISTANT_HEADERS = ("<|im_start|>assistant", "<|start_header_id|>assistant<|end_header_id|>")
_END_MARKERS = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|end_of_text|>")

_THINK = r"<think>.*?</think>"
_TOOL = r"\n<tool_call>\n.*?\n</tool_call>"
_RESPONSE = r"\n<response>.*?</response>"
# (whether the ground truth has a tool call, whether it has a response) -> format
_SHAPES = {
    (tool, response): re.compile(_THINK + _TOOL * tool + _RESPONSE * response, re.DOTALL)
    for tool in (False, True)
    for response in (False, True)
}
# An unclosed quote matches too, which keeps the scan linear.
_JSON_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"?|[\[\]{}]', re.DOTALL)


def extract_response(text: str) -> str:
    """Return the last assistant turn of a decoded ChatML or Llama 3 chat, up to its end marker."""
    for header in _ASSISTANT_HEADERS:
        text = text.rsplit(header, 1)[-1]
    for marker in _END_MARKERS:
        text = text.split(marker, 1)[0]
    return text.strip()


def format_reward(
    prompts: Sequence[Any], completions: Sequence[str], *, ground_truth: Sequence[str], **columns: Any
) -> list[float]:
    """Return 1.0 for each completion in the format of its ground truth, else 0.0.

    The format is `<think>…</think>`, followed by `\\n<tool_call>\\n…\\n</tool_call>` and
    `\\n<response>…</response>` if the ground truth has them, and nothing else. The tags of these
    last two parts must occur exactly once. The JSON is not parsed. Surrounding whitespace is ignored.
    """
    _check_truths("format_reward", ground_truth, len(completions))
    pairs = zip(completions, ground_truth, strict=True)
    return [_format(completion.strip(), truth) for completion, truth in pairs]


def accuracy_reward(
    prompts: Sequence[Any],
    completions: Sequence[str],
    *,
    ground_truth: Sequence[str],
    score_range: Sequence[float] = ACCURACY_RANGE,
    **columns: Any,
) -> list[float]:
    """Return how well the tool calls of each completion match its ground truth, in `score_range`.

    S is the Jaccard index of the true and the predicted tool names (as multisets), plus a term for each true
    call. The term compares the call with the best unused predicted call of the same name. It is the Jaccard
    index of the two calls' parameter names, plus the number of equal values.

        reward = lo + (hi - lo) * S / (1 + sum over true calls of (1 + number of parameters))

    Only the first `<tool_call>` block counts. It has one JSON object per line. The order of calls is ignored,
    as are keys other than `name` and `parameters`. Equality is Python's (`True == 1`, `"1" != 1`). The reward
    is lo if a tag is missing or the block is invalid, and 0 if the ground truth has no call.

    score_range: (lo, hi), which is (-3, 3) in the paper and (-1, 1) in ToolRL's "max 1" variant.
    """
    _check_truths("accuracy_reward", ground_truth, len(completions))
    low, high = score_range
    if not low < high:
        raise ValueError(f"accuracy_reward: score_range is ({low}, {high}), expected (lo, hi) with lo < hi")
    pairs = zip(completions, ground_truth, strict=True)
    return [_accuracy(completion, truth, low, high) for completion, truth in pairs]


def _check_truths(function: str, ground_truth: Sequence[str], expected: int) -> None:
    if len(ground_truth) != expected:
        raise ValueError(f"{function}: ground_truth has {len(ground_truth)} entries, expected {expected}")
    for i, truth in enumerate(ground_truth):
        if not isinstance(truth, str):
            raise ValueError(f"{function}: ground_truth[{i}] is {type(truth).__name__}, expected str")


def _format(response: str, truth: str) -> float:
    has_tool, has_response = "<tool_call>" in truth, "<response>" in truth
    tags = ("<tool_call>", "</tool_call>") * has_tool + ("<response>", "</response>") * has_response
    # Count tags first. If each occurs once, the lazy patterns backtrack at most linearly.
    if any(response.count(tag) != 1 for tag in tags):
        return 0.0
    return float(_SHAPES[has_tool, has_response].fullmatch(response) is not None)


def _accuracy(response: str, truth: str, low: float, high: float) -> float:
    if "<tool_call>" not in truth:
        return NO_CALL_REWARD
    true_calls = _true_calls(truth)
    try:
        calls = _read_calls(response)
        if calls == list(true_calls):
            return high
        score = _score(true_calls, calls)
    except ValueError:
        return low
    best_score = 1.0 + sum(1 + len(call["parameters"]) for call in true_calls)
    return high if score == best_score else low + (high - low) * score / best_score


def _score(true_calls: Sequence[dict[str, Any]], calls: Sequence[dict[str, Any]]) -> float:
    """Return S of `accuracy_reward`. Raise ValueError if a compared call has no parameters."""
    score = _jaccard([call["name"] for call in true_calls], [call["name"] for call in calls])
    unused = list(calls)
    for true_call in true_calls:
        best, best_index = 0.0, None
        for index, call in enumerate(unused):
            if call["name"] == true_call["name"]:
                match = _parameter_score(true_call["parameters"], call.get("parameters"))
                if match > best:
                    best, best_index = match, index
        if best_index is not None:
            score += best
            del unused[best_index]
    return score


def _parameter_score(true: dict[str, Any], predicted: object) -> float:
    if not isinstance(predicted, dict):
        raise ValueError("expected an object as `parameters`")
    equal = sum(name in predicted and predicted[name] == value for name, value in true.items())
    return _jaccard(list(true), list(predicted)) + equal


def _jaccard(a: list[str], b: list[str]) -> float:
    """Return the Jaccard index of two multisets, or 1 if both are empty."""
    if not a and not b:
        return 1.0
    shared = (Counter(a) & Counter(b)).total()
    return shared / (len(a) + len(b) - shared)


@lru_cache(maxsize=4096)
def _true_calls(truth: str) -> tuple[dict[str, Any], ...]:
    """Parse the calls of a ground truth. The result is cached for all samples of a prompt."""
    try:
        calls = _read_calls(truth)
        if any(not isinstance(call.get("parameters"), dict) for call in calls):
            raise ValueError("a call without an object as `parameters`")
    except ValueError as error:
        raise ValueError(f"accuracy_reward: malformed ground_truth {truth[:200]!r}: {error}") from None
    return tuple(calls)


def _read_calls(text: str) -> list[dict[str, Any]]:
    """Parse the first `<tool_call>` block. Raise ValueError unless each line is an object with a name.

    As in ToolRL's code, both tags must occur, and a second opening tag also ends the block.
    """
    if "<tool_call>" not in text or "</tool_call>" not in text:
        raise ValueError("expected <tool_call> and </tool_call>")
    block = text.split("<tool_call>", 2)[1].split("</tool_call>", 1)[0].strip()
    if len(block) > MAX_BLOCK_CHARS:
        raise ValueError(f"tool calls of {len(block)} characters, expected at most {MAX_BLOCK_CHARS}")
    calls = []
    for line in block.split("\n"):
        if json_depth(line) > MAX_JSON_DEPTH:
            raise ValueError(f"JSON nested more than {MAX_JSON_DEPTH} deep")
        call = json.loads(line)  # accepts NaN and Infinity, as in ToolRL
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise ValueError(f"expected an object with a text as `name`, got {line[:80]!r}")
        calls.append(call)
    return calls


def json_depth(line: str) -> int:
    """Return the nesting depth of brackets outside strings. Up to MAX_JSON_DEPTH, it is an upper bound."""
    if (brackets := line.count("{") + line.count("[")) <= MAX_JSON_DEPTH:
        return brackets
    depth = deepest = 0
    for token in _JSON_STRING_OR_BRACKET.finditer(line):
        if token[0] in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif token[0] in "]}":
            depth -= 1
    return deepest
