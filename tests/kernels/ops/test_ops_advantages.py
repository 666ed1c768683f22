"""The public advantages: their defaults, and that every option reaches the definition.

Their values are held to loops in tests/kernels/conformance/test_advantages.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from smopd.kernels.reference import advantages as reference
from smopd.kernels.types import AdvantageOptions
from smopd.ops import gd2po_advantages, gdpo_advantages, grpo_advantages

OPERATIONS = {"grpo": grpo_advantages, "gdpo": gdpo_advantages, "gd2po": gd2po_advantages}
GENERATOR = torch.Generator().manual_seed(0)
REWARDS = torch.randn(23, 3, generator=GENERATOR)
GROUP = torch.randint(0, 4, (23,), generator=GENERATOR)
LENGTHS = {"lengths_R": torch.randint(0, 50, (23,), generator=GENERATOR)}
DEFAULTS: dict[str, dict[str, Any]] = {
    "grpo": {"norm_eps": 1e-6},
    "gdpo": {"whiten": "responses", "norm_eps": 1e-6},
    "gd2po": {"whiten": "tokens", "snr_threshold": None, "norm_eps": 1e-6},
}
GIVEN: list[tuple[str, dict[str, Any]]] = [
    ("grpo", {}),
    ("grpo", {"weights_K": torch.tensor([0.5, 2.0, 1.0]), "norm_eps": 0.1}),
    ("gdpo", {}),
    ("gdpo", {"weights_K": torch.tensor([0.5, 2.0, 1.0]), "norm_eps": 0.1}),
    ("gdpo", {**LENGTHS, "whiten": "tokens"}),
    ("gdpo", {"whiten": None}),
    ("gd2po", LENGTHS),
    ("gd2po", {**LENGTHS, "weights_K": torch.tensor([0.5, 2.0, 0.0]), "snr_threshold": 0.5}),
    ("gd2po", {"whiten": "responses", "norm_eps": 0.1}),
]


@pytest.mark.parametrize(("kind", "options"), GIVEN, ids=["-".join([kind, *given]) for kind, given in GIVEN])
def test_equal_the_definition(kind: str, options: dict[str, Any]) -> None:
    spelt = AdvantageOptions(kind, **DEFAULTS[kind] | options)
    want = [part for part in reference.advantages(REWARDS, GROUP, spelt) if part is not None]
    got = OPERATIONS[kind](REWARDS, GROUP, **options)
    for mine, definition in zip(got if kind == "gd2po" else [got], want, strict=True):
        assert torch.equal(mine, definition)


@pytest.mark.parametrize("kind", DEFAULTS)
def test_no_responses(kind: str) -> None:
    options = {"lengths_R": GROUP[:0]} if kind == "gd2po" else {}
    got = OPERATIONS[kind](REWARDS[:0], GROUP[:0], **options)
    assert all(part.shape == (0,) for part in (got if kind == "gd2po" else [got]))
