"""Two rewards of the toy world that pull against each other: say every value that was asked for, be brief."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any


def coverage_reward(
    prompts: Sequence[Any], completions: Sequence[str], ground_truth: Sequence[str], **columns: Any
) -> list[float]:
    """The share of the true call's values that a completion holds, 0 to 1; 1 where there are none."""
    return [_covered(completion, truth) for completion, truth in zip(completions, ground_truth, strict=True)]


def brevity_reward(
    prompts: Sequence[Any], completions: Sequence[str], *, longest: int = 160, **columns: Any
) -> list[float]:
    """1 for an empty completion, falling evenly to 0 at `longest` characters."""
    return [1.0 - min(len(completion), longest) / longest for completion in completions]


def _covered(completion: str, truth: str) -> float:
    call = json.loads(truth.split("<tool_call>\n", 1)[1].split("\n</tool_call>", 1)[0])
    values = [str(value) for value in call["parameters"].values()]
    return sum(value in completion for value in values) / len(values) if values else 1.0
