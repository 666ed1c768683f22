"""One step's metrics: means and spreads, times, and the peak of a CUDA device's memory."""

from __future__ import annotations

import math

import pytest
import torch

from smopd.engine import distributed
from smopd.record.metrics import GIB, Metrics


def test_means_spreads_and_times() -> None:
    metrics = Metrics(torch.device("cpu"))
    metrics.add("a", torch.tensor([1.0, math.nan]))
    metrics.add("a", 2.0)
    metrics.add("b", torch.tensor([1.0, 3.0]), spread=True)
    metrics.add("c", torch.tensor([]))
    with metrics.phase("work"):
        pass
    values = metrics.reduce()
    assert values.pop("seconds/work") >= 0.0
    assert math.isnan(values.pop("c"))
    assert values == {"a": 1.5, "b/mean": 2.0, "b/std": pytest.approx(math.sqrt(2.0))}


def test_nothing_is_said_of_a_cpu_s_memory() -> None:
    assert Metrics().reduce() == Metrics(torch.device("cpu")).reduce() == {}


def test_the_peak_of_a_cuda_device_is_the_step_s_and_the_largest_of_any_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, torch.device]] = []
    reduced: list[str] = []
    device = torch.device("cuda", 3)

    def peak(of: torch.device) -> int:
        asked.append(("peak", of))
        return 5 * GIB // 2

    def all_reduce(value: torch.Tensor, op: str = "sum") -> torch.Tensor:
        reduced.append(op)
        return value + 1.0

    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda of: asked.append(("reset", of)))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", peak)
    monkeypatch.setattr(distributed, "all_reduce", all_reduce)
    metrics = Metrics(device)
    assert asked == [("reset", device)]
    assert metrics.reduce() == {"memory/peak_gib": 3.5}
    assert asked == [("reset", device), ("peak", device)] and reduced == ["max"]


@pytest.mark.gpu
def test_the_peak_on_a_gpu() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    before = torch.empty(GIB // 8, dtype=torch.uint8, device=device)
    del before
    metrics = Metrics(device)
    held = torch.cuda.memory_allocated(device) / GIB
    assert metrics.reduce()["memory/peak_gib"] == pytest.approx(held)
    block = torch.empty(GIB // 4, dtype=torch.uint8, device=device)
    del block
    assert metrics.reduce()["memory/peak_gib"] == pytest.approx(held + 0.25)
