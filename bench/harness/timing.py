"""Times of several calls, taken turn by turn so that whatever disturbs the machine disturbs them alike.

Each sample is one call on cold caches: before it a buffer larger than the last-level cache is read (read, not
written, or the timed call would pay for the write-back). On a GPU two events stand around the call.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

CPU_FLUSH_BYTES = 64 << 20
MIN_ROUNDS, MAX_ROUNDS = 3, 200
GRAPH_CALLS = 20
HEAD_START_CYCLES = 2_000_000  # about a millisecond: the host has enqueued the call before the first event


@dataclass(frozen=True)
class Turn:
    """One call to time: run(prepare()) inside context(). Only run is timed."""

    run: Callable[[Any], Any]
    prepare: Callable[[], Any] = lambda: None
    context: Callable[[], AbstractContextManager] = nullcontext


@dataclass
class Times:
    seconds: list[float] = field(default_factory=list)

    def quantiles(self) -> tuple[float, float, float]:
        """p20, median, p80."""
        values = torch.tensor(self.seconds, dtype=torch.float64)
        return tuple(values.quantile(torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)).tolist())

    @property
    def median(self) -> float:
        return self.quantiles()[1]


class CpuClock:
    """Wall time."""

    def __init__(self) -> None:
        self._buffer = torch.ones(CPU_FLUSH_BYTES // 4)

    def sample(self, turn: Turn) -> Callable[[], float]:
        with turn.context():
            prepared = turn.prepare()
            self._buffer.sum()
            start = time.perf_counter()
            turn.run(prepared)
            elapsed = time.perf_counter() - start
        return lambda: elapsed

    def settle(self) -> None:
        pass


class CudaClock:
    """Time on the device between two events, as seen by a host that runs ahead."""

    def __init__(self, device: str) -> None:
        properties = torch.cuda.get_device_properties(device)
        n_bytes = 2 * getattr(properties, "L2_cache_size", 64 << 20)
        self._buffer = torch.ones(n_bytes // 4, device=device)

    def sample(self, turn: Turn) -> Callable[[], float]:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with turn.context():
            prepared = turn.prepare()
            self._buffer.sum()
            torch.cuda._sleep(HEAD_START_CYCLES)
            before.record()
            turn.run(prepared)
            after.record()
        return lambda: before.elapsed_time(after) / 1e3

    def settle(self) -> None:
        torch.cuda.synchronize()


def clock_for(device: str) -> CpuClock | CudaClock:
    return CpuClock() if device == "cpu" else CudaClock(device)


def interleaved(
    turns: dict[str, Turn], clock: Any, seconds: float, rounds: int | None = None
) -> dict[str, Times]:
    """A sample of every turn in each round, the first one another each time, for about `seconds` in all.

    rounds: how many instead, and without a warm-up, for turns that take long.
    """
    names = list(turns)
    if rounds is None:
        _one_round(names, turns, clock)  # warm-up
        started = time.perf_counter()
        _one_round(names, turns, clock)
        rounds = int(seconds / max(time.perf_counter() - started, 1e-9))
        rounds = max(MIN_ROUNDS, min(rounds, MAX_ROUNDS))
    times = {name: Times() for name in names}
    collecting = gc.isenabled()
    gc.disable()  # a collection takes as long as many of the calls
    try:
        for turn in range(rounds):
            first = turn % len(names)
            for name, value in _one_round(names[first:] + names[:first], turns, clock).items():
                times[name].seconds.append(value)
    finally:
        if collecting:
            gc.enable()
    return times


def _one_round(names: list[str], turns: dict[str, Turn], clock: Any) -> dict[str, float]:
    samples = {name: clock.sample(turns[name]) for name in names}
    clock.settle()
    return {name: sample() for name, sample in samples.items()}


def graph_seconds(turn: Turn, clock: CudaClock) -> float:
    """Median time of a call when many are replayed from a captured graph: launch gaps mostly gone.

    Raises:
        RuntimeError: the call cannot be captured.
    """
    with turn.context():
        prepared = turn.prepare()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            turn.run(prepared)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(GRAPH_CALLS):
                turn.run(prepared)
    replay = {"replay": Turn(run=lambda _: graph.replay())}
    return interleaved(replay, clock, 1.0, rounds=30)["replay"].median / GRAPH_CALLS
