"""Our own clock for pytest-benchmark, as no library makes the input anew before each call, outside the time.

Operations that write over their input need that. triton.testing.do_bench calls one function again and again;
torch.utils.benchmark's timeit warms up with two calls on one input. Caches are cold; on a GPU the device's
time is taken. What is launch-bound is timed by triton.testing.do_bench_cudagraph.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

CPU_FLUSH_BYTES = 64 << 20
MIN_ROUNDS, MAX_ROUNDS = 3, 100
HEAD_START_CYCLES = 2_000_000  # about a millisecond: the host has enqueued the call before the first event


class Clock:
    """The time that the calls made through it took; pytest-benchmark reads it before and after each."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.seconds = 0.0

    @cached_property
    def _buffer(self) -> Tensor:
        n_bytes = CPU_FLUSH_BYTES
        if self._device != "cpu":
            n_bytes = 2 * getattr(torch.cuda.get_device_properties(0), "L2_cache_size", CPU_FLUSH_BYTES)
        return torch.ones(n_bytes // 4, device=self._device)

    def read(self) -> float:
        return self.seconds

    def time(self, call: Callable[[], Any]) -> float:
        """Seconds of one call on cold caches: a buffer larger than the last cache is read before it."""
        self._buffer.sum()
        if self._buffer.is_cuda:
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(HEAD_START_CYCLES)
            before.record()
            call()
            after.record()
            torch.cuda.synchronize()
            elapsed = before.elapsed_time(after) / 1e3
        else:
            start = time.perf_counter()
            call()
            elapsed = time.perf_counter() - start
        self.seconds += elapsed
        return elapsed


def rounds_within(seconds: float, one: float) -> int:
    return max(MIN_ROUNDS, min(int(seconds / max(one, 1e-9)), MAX_ROUNDS))
