"""Fixtures of the kernels' tests."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from bench.harness.accuracy import poisoned_memory


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """Fill new memory with NaN in all tests of kernels, to reveal reads before writes."""
    with poisoned_memory():
        assert torch.utils.deterministic.fill_uninitialized_memory
        assert bool(torch.empty(1000).isnan().all())
        yield


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use so small Triton blocks that a short row is partly streamed and partly held."""
    from smopd.kernels.triton import loss

    monkeypatch.setattr(loss, "_configuration", lambda *_, **__: (1, 16, 2))


@pytest.fixture
def each_number_of_threads() -> Iterator[Callable[..., list]]:
    """Return a function that collects the results of a call on one, two and three threads."""
    before = torch.get_num_threads()

    def results(call: Callable[[], Any], counts: tuple[int, ...] = (1, 2, 3)) -> list:
        found = []
        for count in counts:
            torch.set_num_threads(count)
            found.append(call())
        return found

    yield results
    torch.set_num_threads(before)
