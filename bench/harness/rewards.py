"""Rewards of token ids for random models, used by bench/training_step.yaml and bench/gpu/step.py."""

from __future__ import annotations


def even(completion_ids: list[list[int]], **_: object) -> list[float]:
    """Return the share of even ids."""
    return [sum(i % 2 == 0 for i in ids) / max(1, len(ids)) for ids in completion_ids]


def thirds(completion_ids: list[list[int]], **_: object) -> list[float]:
    """Return whether the first id is a multiple of three."""
    return [float(sum(ids[:1]) % 3 == 0) for ids in completion_ids]
