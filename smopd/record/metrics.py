"""Means and spreads over all ranks, gathered during a step and reduced once."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from smopd.engine import distributed

GIB = 1 << 30


class Metrics:
    """Accumulates one step's values. Every rank must add the same names in the same order.

    On a CUDA device `memory/peak_gib` is among them: the most that torch's allocator had handed out at once
    in this process since this was made; an engine in a process of its own is not in it.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._cuda = device if device is not None and device.type == "cuda" else None
        if self._cuda is not None:
            torch.cuda.reset_peak_memory_stats(self._cuda)
        self._moments: dict[str, Tensor] = {}
        self._spread: set[str] = set()
        self._seconds: dict[str, float] = {}

    def add(self, name: str, values: Tensor | float, *, spread: bool = False) -> None:
        """Adds values to a mean; NaN is left out. `spread` also gives their standard deviation."""
        values = torch.as_tensor(values, dtype=torch.float64).flatten().cpu()
        values = values[~values.isnan()]
        moments = torch.stack(
            [torch.tensor(float(len(values)), dtype=torch.float64), values.sum(), (values**2).sum()]
        )
        self._moments[name] = self._moments.get(name, torch.zeros(3, dtype=torch.float64)) + moments
        if spread:
            self._spread.add(name)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times a part of the step under `seconds/<name>`."""
        begin = time.perf_counter()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - begin

    def reduce(self) -> dict[str, float]:
        """Everything, over all ranks; times and memory are the largest of any rank. A collective call."""
        result: dict[str, float] = {}
        if self._moments:
            stacked = distributed.all_reduce(torch.stack(list(self._moments.values())))
            for name, (count, total, squares) in zip(self._moments, stacked.tolist(), strict=True):
                mean = total / count if count else math.nan
                result[f"{name}/mean" if name in self._spread else name] = mean
                if name in self._spread:
                    variance = max(0.0, squares - count * mean**2) / (count - 1) if count > 1 else 0.0
                    result[f"{name}/std"] = math.sqrt(variance)
        if self._seconds:
            slowest = distributed.all_reduce(
                torch.tensor(list(self._seconds.values()), dtype=torch.float64), "max"
            )
            result |= {
                f"seconds/{name}": value for name, value in zip(self._seconds, slowest.tolist(), strict=True)
            }
        if self._cuda is not None:
            peak = torch.tensor(torch.cuda.max_memory_allocated(self._cuda) / GIB, dtype=torch.float64)
            result["memory/peak_gib"] = float(distributed.all_reduce(peak, "max"))
        return result
