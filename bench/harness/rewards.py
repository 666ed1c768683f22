"""Rewards for the texts of random models, in bench/training_step.yaml."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def length(prompts: Sequence[Any], completions: Sequence[str], **_: Any) -> list[float]:
    """Return the number of characters, up to 64."""
    return [float(min(len(text), 64)) for text in completions]


def vowels(prompts: Sequence[Any], completions: Sequence[str], **_: Any) -> list[float]:
    """Return the share of vowels."""
    return [sum(letter in "aeiou" for letter in text.lower()) / max(1, len(text)) for text in completions]
