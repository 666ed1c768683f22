"""Run a provider on a case: check its result against float64, then measure memory and time.

A wrong result is not timed. Its row says what is wrong.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from bench.harness.accuracy import judge, poisoned_memory
from bench.harness.memory import peak_bytes
from bench.harness.types import Benchmark, Case, Ceiling, Expected, Provider

GRAPH_BELOW_S = 1e-3  # launch gaps do not matter in longer calls
ENV = "SMOPD_BACKEND"
CANNOT = "cannot serve this call"  # text in the error of a backend that has no kernel for the call
P20, P80 = 0.2, 0.8
CPU_FLUSH_BYTES = 64 << 20
MIN_ROUNDS, MAX_ROUNDS = 3, 100
HEAD_START_CYCLES = 10_000_000  # about five milliseconds, in which the host enqueues the call


class Clock:
    """A timer for pytest-benchmark that advances only by the time of calls made through `time`.

    So the measured times exclude what precedes a call: the preparation of its inputs and the cache flush.
    """

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
        """Flush the cache by reading a large buffer, then time a call. Return its seconds."""
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


@contextmanager
def forced(backend: str) -> Iterator[None]:
    """Force a backend. "" means the default choice."""
    before = os.environ.get(ENV, "")
    os.environ[ENV] = backend
    try:
        yield
    finally:
        os.environ[ENV] = before


@dataclass(frozen=True)
class Setting:
    """A case on a device, with the inputs, truth and ceiling that its providers share."""

    name: str
    benchmark: Benchmark
    case: Case
    device: str

    @cached_property
    def inputs(self) -> Any:
        gc.collect()
        torch.manual_seed(0)
        return self.benchmark.inputs(self.case, self.device)

    @cached_property
    def truth(self) -> dict[str, Expected]:
        return self.benchmark.truth(self.inputs)

    @cached_property
    def ceiling(self) -> Ceiling:
        return self.benchmark.ceiling(self.inputs)

    def prepared(self, provider: Provider) -> Any:
        return self.inputs if provider.prepare is None else provider.prepare(self.inputs)

    def head(self, provider: Provider) -> dict:
        row = {"benchmark": self.name, "case": self.case.label, "provider": provider.name}
        return row | {"kind": provider.kind} | ({"computes": provider.note} if provider.note else {})


def checked(setting: Setting, provider: Provider) -> dict:
    """Return a provider's row with its errors and memory, or with why it is `refused` or `left_out`."""
    row = setting.head(provider)
    if provider.module and importlib.util.find_spec(provider.module) is None:
        return row | {"left_out": f"{provider.module} is not installed"}
    truth = setting.truth
    try:
        with forced(provider.backend):
            prepared = setting.prepared(provider)
            started = time.perf_counter()
            with poisoned_memory():
                outputs = provider.run(prepared)
            first_s = time.perf_counter() - started
            fault, errors, share = judge(provider, outputs, truth)
            del prepared, outputs
            row["errors"] = {name: _digits(error, 3) for name, error in errors.items()}
            if fault is not None:
                return row | {"refused": fault}
            prepared = setting.prepared(provider)
            peak = peak_bytes(lambda: provider.run(prepared), setting.device)
    except torch.OutOfMemoryError:
        return row | {"left_out": "out of memory"}
    except Exception as error:
        message = str(error).partition("\n")[0]
        if CANNOT in message:
            return row | {"left_out": message}
        ours = provider.kind in ("ours", "eager")
        return row | {"refused" if ours else "left_out": f"{type(error).__name__}: {message}"}
    row |= {"of_bound": round(share, 3), "first_s": round(first_s, 3)}
    return row | {"peak_mib": None if peak is None else round(peak / 2**20, 1)}


def timed(setting: Setting, provider: Provider, clock: Clock, seconds: float, pedantic: Callable) -> dict:
    """Time a provider in turn with the ceiling, for about `seconds` and at least MIN_ROUNDS rounds.

    pedantic: the method of pytest-benchmark's fixture, with clock.read as timer. It returns sorted times.
    """
    ceilings: list[float] = []

    def setup() -> tuple[tuple, dict]:
        ceilings.append(clock.time(setting.ceiling.run))
        return (setting.prepared(provider),), {}

    def call(prepared: Any) -> None:
        clock.time(lambda: provider.run(prepared))

    with forced(provider.backend):
        rounds = setting.case.repeats
        if rounds is None:
            started = time.perf_counter()
            call(setup()[0][0])
            took = time.perf_counter() - started
            rounds = max(MIN_ROUNDS, min(int(seconds / took), MAX_ROUNDS))
            ceilings.clear()
        times = torch.tensor(pedantic(call, setup, rounds), dtype=torch.float64)
        least = float(torch.tensor(ceilings, dtype=torch.float64).median())
        low, median, high = (float(times.quantile(share)) for share in (P20, 0.5, P80))
        row: dict = {"ms": _digits(median * 1e3), "p20_ms": _digits(low * 1e3), "p80_ms": _digits(high * 1e3)}
        row |= {"repeats": len(times), "ceiling": setting.ceiling.name, "ceiling_ms": _digits(least * 1e3)}
        row["of_ceiling"] = _digits(least / median)
        if setting.ceiling.bytes:
            row["ceiling_gb_per_s"] = _digits(setting.ceiling.bytes / least / 1e9)
        if setting.ceiling.flops:
            row["ceiling_gflop_per_s"] = _digits(setting.ceiling.flops / least / 1e9)
        if setting.benchmark.launch_bound and setting.device != "cpu" and median < GRAPH_BELOW_S:
            row |= _graph(setting, provider)
    return row


def _graph(setting: Setting, provider: Provider) -> dict:
    """Time a call in a replayed CUDA graph, mostly without launch gaps."""
    from triton.testing import do_bench_cudagraph

    prepared = setting.prepared(provider)
    try:
        ms = do_bench_cudagraph(lambda: provider.run(prepared), return_mode="median")
        return {"graph_ms": _digits(ms)}
    except Exception as error:  # a failed capture may raise anything
        torch.cuda.synchronize()
        return {"graph_ms": None, "no_graph": str(error).splitlines()[0][:120]}


def _digits(value: float, n: int = 4) -> float:
    return float(f"{value:.{n}g}")
