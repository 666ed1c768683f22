"""The rewards of RLLA (ToolRL): has a response the right shape, are its tool calls right, how long is it.

Pure functions of the response's text and the item's ground truth, safe on hostile text: calls are read by
`json.loads` under a size and a depth limit, never evaluated. Defaults are those of the paper's runs; ToolRL's
other forms are keyword arguments, given as `kwargs` of a recipe's reward.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Literal, TypeAlias, get_args

ACCURACY_RANGE = (-3.0, 3.0)  # ToolRL: R_correct in [-3, 3]
NO_CALL_REWARD = 0.0  # ToolRL: an item whose truth holds no call
MAX_BLOCK_CHARS = 65_536  # ours: far above the 1024 new tokens of every recipe
MAX_JSON_DEPTH = 64  # ours: far below the interpreter's recursion limit

_ASSISTANT_HEADERS = ("<|im_start|>assistant", "<|start_header_id|>assistant<|end_header_id|>")
_END_MARKERS = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|end_of_text|>")

_THINK = r"<think>.*?</think>"
_TOOL = r"\n<tool_call>\n.*?\n</tool_call>"
_RESPONSE = r"\n<response>.*?</response>"
# (the truth has a tool call, the truth has a response) -> the shape of a response
_SHAPES = {
    (tool, response): re.compile(_THINK + _TOOL * tool + _RESPONSE * response, re.DOTALL)
    for tool in (False, True)
    for response in (False, True)
}
# A quote without an end matches too, so that the scan stays linear in the text.
_JSON_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"?|[\[\]{}]', re.DOTALL)


def extract_response(text: str) -> str:
    """The response in a decoded chat: after the last assistant header, up to the first end marker, stripped.

    Text without header and marker is only stripped. Knows the headers of ChatML and Llama 3.
    """
    for header in _ASSISTANT_HEADERS:
        text = text.rsplit(header, 1)[-1]
    for marker in _END_MARKERS:
        text = text.split(marker, 1)[0]
    return text.strip()


def format_reward(
    prompts: Sequence[Any],
    completions: Sequence[str],
    *,
    ground_truth: Sequence[str],
    scale: Scale = "fixed",
    training_step: Sequence[int] | None = None,
    **columns: Any,
) -> list[float]:
    """1.0 where a completion has the shape that the tags of its ground truth ask for, else 0.0.

    Shapes: `<think>…</think>`, then, where the truth has one, `\\n<tool_call>\\n…\\n</tool_call>`, then,
    where the truth has one, `\\n<response>…</response>`; nothing before, between or after. Tags of the shape
    other than think occur exactly once. The JSON is not read.

    Args:
        prompts: R prompts, unused.
        completions: R responses without prompt and end marker; surrounding whitespace is ignored.
        ground_truth: R true responses, of which only the tags count.
        scale: other values than 0 and 1 while training (smopd.rewards.rlla).
        training_step: of each response, from 0; None outside of training, where the scale is fixed.
    Raises:
        ValueError: lengths differ, the scale is unknown, or a ground truth is no text.
    """
    steps = _steps("format_reward", completions, ground_truth, training_step, scale)
    rewards = []
    for completion, truth, step in zip(completions, ground_truth, steps, strict=True):
        low, high = format_range(scale, step)
        rewards.append(high if _format(completion.strip(), truth) else low)
    return rewards


def accuracy_reward(
    prompts: Sequence[Any],
    completions: Sequence[str],
    *,
    ground_truth: Sequence[str],
    score_range: Sequence[float] = ACCURACY_RANGE,
    granularity: Granularity = "fine",
    scale: Scale = "fixed",
    training_step: Sequence[int] | None = None,
    **columns: Any,
) -> list[float]:
    """How far the tool calls of each completion are those of its ground truth: lo to hi of `score_range`.

    With S the Jaccard index of the two multisets of tool names, plus for each true call, over the best unused
    prediction of the same name, the Jaccard index of the parameter names and the number of equal values:

        reward = lo + (hi - lo) * S / (1 + sum over true calls of (1 + number of parameters))

    Only the first `<tool_call>` block is read, one JSON object a line. The order of calls, and keys other
    than `name` and `parameters`, do not matter; equality is Python's (`True == 1`, `"1" != 1`). A missing
    tag, or a block that cannot be read so, gives lo. A truth without a call gives 0 whatever was said.

    That is the granularity "fine". ToolRL's coarser ones give hi to equal lists of calls as well, and else:
    "refined" takes 1 for equal lists of names, in their order, and 0 for others in place of each Jaccard
    index; "intermediate" counts true calls with an equal prediction, 1 each, over 1 + the number of true
    calls; "coarse" gives lo.

    Args:
        prompts: R prompts, unused.
        completions: R responses without prompt and end marker.
        ground_truth: R true responses.
        score_range: (lo, hi); (-3, 3) is the paper's, (-1, 1) ToolRL's "max 1" variant.
        granularity: "fine" (the paper's), "refined", "intermediate" or "coarse".
        scale: another range while training (smopd.rewards.rlla).
        training_step: of each response, from 0; None outside of training, where the scale is fixed.
    Raises:
        ValueError: lengths differ, the range is empty, granularity or scale is unknown, or a ground truth has
            a tool call that cannot be read.
    """
    steps = _steps("accuracy_reward", completions, ground_truth, training_step, scale)
    if granularity not in GRANULARITIES:
        raise ValueError(
            f"accuracy_reward: granularity is {granularity!r}, expected one of {', '.join(GRANULARITIES)}"
        )
    lowest, highest = score_range
    if not lowest < highest:
        raise ValueError(
            f"accuracy_reward: score_range is ({lowest}, {highest}), expected (lo, hi) with lo < hi"
        )
    rewards = []
    for completion, truth, step in zip(completions, ground_truth, steps, strict=True):
        low, high = accuracy_range(scale, step, lowest, highest)
        rewards.append(_accuracy(completion, truth, low, high, granularity))
    return rewards


def length_reward(
    prompts: Sequence[Any],
    completions: Sequence[str],
    *,
    growing: bool = False,
    training_step: Sequence[int] | None = None,
    **columns: Any,
) -> list[float]:
    """How long a response thinks: 0 to 1, ToolRL's added reward (its WITHLENGTH), in no run of the paper.

    The words behind the last `<think>`, up to the next `</think>`, over 512, rounded to two digits and at
    most 1; without both tags 0.

    Args:
        prompts: R prompts, unused.
        completions: R responses without prompt and end marker.
        growing: over 384 words at step 0, 640 at step 105 and so on (ToolRL's SCHEDULELENGTH).
        training_step: of each response, from 0; None outside of training, where 512 words it is.
    Raises:
        ValueError: lengths differ.
    """
    steps = _steps("length_reward", completions, None, training_step, "fixed")
    rewards = []
    for completion, step in zip(completions, steps, strict=True):
        if "<think>" not in completion or "</think>" not in completion:
            rewards.append(0.0)
            continue
        words = len(completion.rsplit("<think>", 1)[-1].split("</think>", 1)[0].split())
        rewards.append(min(round(words / length_target(growing, step), 2), 1.0))
    return rewards


def _format(response: str, truth: str) -> float:
    has_tool, has_response = "<tool_call>" in truth, "<response>" in truth
    tags = ("<tool_call>", "</tool_call>") * has_tool + ("<response>", "</response>") * has_response
    # Counted first: with each tag once, the lazy patterns cannot backtrack more than linearly.
    if any(response.count(tag) != 1 for tag in tags):
        return 0.0
    return float(_SHAPES[has_tool, has_response].fullmatch(response) is not None)


def _accuracy(response: str, truth: str, low: float, high: float, granularity: Granularity) -> float:
    if "<tool_call>" not in truth:
        return NO_CALL_REWARD
    true_calls = _true_calls(truth)
    try:
        calls = _read_calls(response)
        if calls == list(true_calls):
            return high
        score, best_score = _score(true_calls, calls, granularity)
    except ValueError:
        return low
    return high if score == best_score else low + (high - low) * score / best_score


def _score(
    true_calls: Sequence[dict[str, Any]], calls: Sequence[dict[str, Any]], granularity: Granularity
) -> tuple[float, float]:
    """S of `accuracy_reward`, and the highest there is, for lists that differ.

    ValueError where a predicted call that is compared has no parameters.
    """
    if granularity == "coarse":
        return 0.0, 1.0
    likeness = _equality if granularity == "refined" else _jaccard
    score = likeness([call["name"] for call in true_calls], [call["name"] for call in calls])
    unused = list(calls)
    if granularity == "intermediate":
        for true_call in true_calls:
            if true_call in unused:
                unused.remove(true_call)
                score += 1.0
        return score, 1.0 + len(true_calls)
    for true_call in true_calls:
        best, best_index = 0.0, None
        for index, call in enumerate(unused):
            if call["name"] == true_call["name"]:
                match = _parameter_score(true_call["parameters"], call.get("parameters"), likeness)
                if match > best:
                    best, best_index = match, index
        if best_index is not None:
            score += best
            del unused[best_index]
    return score, 1.0 + sum(1 + len(call["parameters"]) for call in true_calls)


def _parameter_score(
    true: dict[str, Any], predicted: object, likeness: Callable[[list[str], list[str]], float]
) -> float:
    if not isinstance(predicted, dict):
        raise ValueError("expected an object as `parameters`")
    equal = sum(name in predicted and predicted[name] == value for name, value in true.items())
    return likeness(list(true), list(predicted)) + equal


def _jaccard(a: list[str], b: list[str]) -> float:
    """Jaccard index of two multisets; 1 for two empty ones."""
    if not a and not b:
        return 1.0
    shared = (Counter(a) & Counter(b)).total()
    return shared / (len(a) + len(b) - shared)


def _equality(a: list[str], b: list[str]) -> float:
    return float(a == b)


@lru_cache(maxsize=4096)
def _true_calls(truth: str) -> tuple[dict[str, Any], ...]:
    """The calls of a ground truth, which must be well formed; read once for all samples of a prompt."""
    try:
        calls = _read_calls(truth)
        if any(not isinstance(call.get("parameters"), dict) for call in calls):
            raise ValueError("a call without an object as `parameters`")
    except ValueError as error:
        raise ValueError(f"accuracy_reward: malformed ground_truth {truth[:200]!r}: {error}") from None
    return tuple(calls)


def _read_calls(text: str) -> list[dict[str, Any]]:
    """The calls in the first `<tool_call>` block, each an object with a name; ValueError for any other.

    As in ToolRL's code, both tags must occur, and the block also ends where another one opens.
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
        call = json.loads(line)  # with NaN and Infinity, as in ToolRL
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise ValueError(f"expected an object with a text as `name`, got {line[:80]!r}")
        calls.append(call)
    return calls


def json_depth(line: str) -> int:
    """How deep brackets nest outside strings; an upper bound where there are too few brackets to matter."""
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


def _steps(
    function: str,
    completions: Sequence[str],
    ground_truth: Iterable[str] | None,
    training_step: Sequence[int] | None,
    scale: str,
) -> Sequence[int | None]:
    """The step of each completion, once the columns are found to fit."""
    if ground_truth is not None:
        truths = list(ground_truth)
        _check_length(function, "ground_truth", len(truths), len(completions))
        for i, truth in enumerate(truths):
            if not isinstance(truth, str):
                raise ValueError(f"{function}: ground_truth[{i}] is {type(truth).__name__}, expected str")
    if scale not in SCALES:
        raise ValueError(f"{function}: scale is {scale!r}, expected one of {', '.join(SCALES)}")
    if training_step is None:
        return [None] * len(completions)
    _check_length(function, "training_step", len(training_step), len(completions))
    return training_step


def _check_length(function: str, column: str, entries: int, expected: int) -> None:
    if entries != expected:
        raise ValueError(f"{function}: {column} has {entries} entries, expected {expected}")


Scale: TypeAlias = Literal["fixed", "two_stage", "dynamic"]
Granularity: TypeAlias = Literal["fine", "refined", "intermediate", "coarse"]
SCALES: tuple[str, ...] = get_args(Scale)
GRANULARITIES: tuple[str, ...] = get_args(Granularity)

# All from ToolRL's rlla.py.
SECOND_STAGE = 30  # first step of the second of two stages
ACCURACY_PART = 1 / 3  # of the accuracy range in the first stage
FORMAT_PART = 1 / 2  # of the format range in the second
SCALE_STEPS = 150  # the dynamic scale's length
DYNAMIC_START = 2.0  # both ranges begin at [-2, 2]
DYNAMIC_FORMAT_END = (-1.0, 1.0)  # nearer to 0 the format's range never comes
LENGTH_WORDS = 512
LENGTH_FROM, LENGTH_TO, LENGTH_STEPS = 384, 640, 105


def accuracy_range(scale: Scale, step: int | None, low: float, high: float) -> tuple[float, float]:
    """The accuracy's (lo, hi) at a step, where (low, high) is the fixed one.

    Beyond SCALE_STEPS the dynamic one stays (low, high); ToolRL's would go on for ranges other than [-3, 3].
    """
    if scale == "fixed" or step is None:
        return low, high
    if scale == "two_stage":
        part = ACCURACY_PART if step < SECOND_STAGE else 1.0
        return low * part, high * part
    share = min(step / SCALE_STEPS, 1.0)
    return (low + DYNAMIC_START) * share - DYNAMIC_START, (high - DYNAMIC_START) * share + DYNAMIC_START


def format_range(scale: Scale, step: int | None) -> tuple[float, float]:
    """What a wrong and a right format are worth at a step."""
    if scale == "fixed" or step is None:
        return 0.0, 1.0
    if scale == "two_stage":
        return 0.0, FORMAT_PART if step >= SECOND_STAGE else 1.0
    share = step / SCALE_STEPS
    low, high = DYNAMIC_FORMAT_END
    return min(DYNAMIC_START * share - DYNAMIC_START, low), max(DYNAMIC_START - share, high)


def length_target(growing: bool, step: int | None) -> float:
    """The words that a full length reward takes."""
    if not growing or step is None:
        return LENGTH_WORDS
    return (LENGTH_TO - LENGTH_FROM) * step / LENGTH_STEPS + LENGTH_FROM
