"""A step's means, deviations, sums and times, which are reduced once over all ranks, and its trace."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import methodcaller
from pathlib import Path

import torch
from torch import Tensor, profiler

from smopd.engine import distributed

GIB = 1 << 30


class Metrics:
    """Accumulates the metrics of one step. Every rank must add the same names in the same order.

    On CUDA, `memory/peak_gib` is the peak of torch's allocator in this process since the step began.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self._moments: dict[str, Tensor] = {}  # count, sum, sum of squares
        self._spread: set[str] = set()
        self._totals: dict[str, Tensor] = {}
        self._longest: dict[str, float] = {}

    def add(self, name: str, values: Tensor | float, *, spread: bool = False) -> None:
        """Add values to the mean `name`, ignoring NaN. With `spread`, also report the standard deviation."""
        values = torch.as_tensor(values, dtype=torch.float64).flatten().cpu()
        values = values[~values.isnan()]
        moments = torch.stack([values.new_tensor(len(values)), values.sum(), values.square().sum()])
        self._moments[name] = self._moments.get(name, 0) + moments
        if spread:
            self._spread.add(name)

    def total(self, name: str, value: Tensor | float) -> None:
        """Add a value to the sum `name`."""
        self._totals[name] = self._totals.get(name, 0) + torch.as_tensor(value, dtype=torch.float64).cpu()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the time of a part of the step, as `seconds/<name>`."""
        begin = time.perf_counter()
        yield
        seconds = time.perf_counter() - begin
        self._longest[f"seconds/{name}"] = self._longest.get(f"seconds/{name}", 0.0) + seconds

    def reduce(self) -> dict[str, float]:
        """Reduce all values over all ranks, times and memory by their maximum. This is a collective call."""
        if self._device.type == "cuda":
            self._longest["memory/peak_gib"] = torch.cuda.max_memory_allocated(self._device) / GIB
        moments = _reduced(self._moments, "sum")
        result: dict[str, float] = {}
        for name, (count, total, squares) in moments.items():
            mean = total / count if count else math.nan
            result[f"{name}/mean" if name in self._spread else name] = mean
            if name in self._spread:
                variance = max(0.0, squares - count * mean * mean) / (count - 1) if count > 1 else 0.0
                result[f"{name}/std"] = math.sqrt(variance) if math.isfinite(squares) else math.nan
        longest = {name: torch.tensor(value, dtype=torch.float64) for name, value in self._longest.items()}
        return result | _reduced(self._totals, "sum") | _reduced(longest, "max")


def _reduced(values: dict[str, Tensor], op: str) -> dict:
    if not values:
        return {}
    reduced = distributed.all_reduce(torch.stack([*values.values()]), op)
    return dict(zip(values, reduced.tolist(), strict=True))


@contextmanager
def profiled(folder: Path, step: int | None, done: int) -> Iterator[Callable[[], None]]:
    """Yield a function to call after each step. Write the trace of `step`, counted from 1, to `folder`.

    `done` is the number of steps before this command.
    """
    if step is None or step <= done:
        yield lambda: None
        return
    trace = folder / f"trace_step_{step}_rank_{distributed.rank()}.json.gz"
    before = step - done - 1
    schedule = profiler.schedule(wait=max(before - 1, 0), warmup=min(before, 1), active=1, repeat=1)
    folder.mkdir(parents=True, exist_ok=True)
    write = methodcaller("export_chrome_trace", str(trace))
    with profiler.profile(schedule=schedule, on_trace_ready=write) as profile:
        yield profile.step
