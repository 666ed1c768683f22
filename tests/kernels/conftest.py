"""Fixtures of the kernels' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """New tensors hold NaN or the largest integer, those too that C++ makes: what is not written shows."""
    torch.set_deterministic_debug_mode("warn")  # the one mode in which torch fills new memory
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert bool(torch.empty(1000).isnan().all())
    yield
    torch.set_deterministic_debug_mode("default")
