"""Metrics of a step: means, deviations, sums, times, and peak CUDA memory."""

from __future__ import annotations

import math

import pytest
import torch

from smopd.record.metrics import GIB, Metrics


def test_means_spreads_sums_and_times() -> None:
    metrics = Metrics(torch.device("cpu"))
    assert metrics.reduce() == {}
    metrics.add("a", torch.tensor([1.0, math.nan]))
    metrics.add("a", 2.0)
    metrics.add("b", torch.tensor([1.0, 3.0]), spread=True)
    metrics.add("c", torch.tensor([]))
    metrics.total("d", 2)
    metrics.total("d", torch.tensor(0.5))
    with metrics.phase("work"):
        pass
    values = metrics.reduce()
    assert values.pop("seconds/work") >= 0.0
    assert math.isnan(values.pop("c"))
    assert values == {"a": 1.5, "b/mean": 2.0, "b/std": pytest.approx(math.sqrt(2.0)), "d": 2.5}


@pytest.mark.gpu
def test_the_peak_on_a_gpu() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    metrics = Metrics(device)
    held = torch.cuda.memory_allocated(device) / GIB
    block = torch.empty(GIB // 4, dtype=torch.uint8, device=device)
    del block
    assert metrics.reduce()["memory/peak_gib"] == pytest.approx(held + 0.25)
