"""Fixtures of the kernels' tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def _poisoned(poisoned_memory: None) -> None:
    """All tests of kernels: memory that is read before it is written, or beside what was written, shows."""


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's blocks are so small that a short row streams, and is partly held."""
    from smopd.kernels.triton import loss

    monkeypatch.setattr(loss, "_configuration", lambda *_, **__: (1, 8, 2))


@pytest.fixture
def each_number_of_threads() -> Iterator[Callable[..., list]]:
    """What a call gives on one, two and three threads."""
    before = torch.get_num_threads()

    def results(call: Callable[[], Any], counts: tuple[int, ...] = (1, 2, 3)) -> list:
        found = []
        for count in counts:
            torch.set_num_threads(count)
            found.append(call())
        return found

    yield results
    torch.set_num_threads(before)
