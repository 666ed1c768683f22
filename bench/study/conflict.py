"""Two conflicting rewards for the toy world: one for the values of the call, and one for brevity."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

_CALL = re.compile(r"<tool_call>\s*(\{.*\})\s*</tool_call>", re.DOTALL)


def coverage_reward(
    prompts: Sequence[Any], completions: Sequence[str], ground_truth: Sequence[str], **columns: Any
) -> list[float]:
    """Return the share of the true call's values that the completion contains, or 1 if there are none."""
    return [_covered(completion, truth) for completion, truth in zip(completions, ground_truth, strict=True)]


def brevity_reward(
    prompts: Sequence[Any], completions: Sequence[str], *, longest: int = 160, **columns: Any
) -> list[float]:
    """Return 1 - characters / `longest`, at least 0. Return 0 without a call, so silence does not win."""
    return [
        1.0 - min(len(completion), longest) / longest if _calls(completion) else 0.0
        for completion in completions
    ]


def _covered(completion: str, truth: str) -> float:
    call = json.loads(truth.split("<tool_call>\n", 1)[1].split("\n</tool_call>", 1)[0])
    values = [str(value) for value in call["parameters"].values()]
    return sum(value in completion for value in values) / len(values) if values else 1.0


def _calls(completion: str) -> bool:
    if (found := _CALL.search(completion)) is None:
        return False
    try:
        call = json.loads(found[1])
    except ValueError:
        return False
    return isinstance(call.get("name"), str)
