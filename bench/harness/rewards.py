"""Rewards for texts of random models, which no task's reward would tell apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def length(prompts: Sequence[Any], completions: Sequence[str], **_: Any) -> list[float]:
    """Characters, up to 64."""
    return [float(min(len(text), 64)) for text in completions]


def vowels(prompts: Sequence[Any], completions: Sequence[str], **_: Any) -> list[float]:
    """Their share of the characters."""
    return [sum(letter in "aeiou" for letter in text.lower()) / max(1, len(text)) for text in completions]
