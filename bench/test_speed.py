"""`pytest bench`: our providers under pytest-benchmark, beside what a baseline file recorded.

What is compared is the share of the ceiling, which is timed before every call: a slower machine or hour moves
both. A share that fell by more than 15% is a warning, not a failure. The baseline of a device is
bench/baselines/<device>.jsonl, made by

    python -m bench --all --output bench/baselines/<device>.jsonl

SMOPD_BENCH_CASES=quick takes tiny sizes: does it work, not how fast is it.
"""

from __future__ import annotations

import functools
import importlib
import os
import statistics
import warnings

import pytest
import torch

from bench.__main__ import names
from bench.harness import record
from bench.harness.providers import absent, forced
from bench.harness.run import CANNOT
from bench.harness.timing import Turn, clock_for
from bench.harness.types import Case, Provider

pytest.importorskip("pytest_benchmark")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = os.environ.get("SMOPD_BENCH_CASES", DEVICE)
ROUNDS = 7
ALLOWED_LOSS = 0.15


class RegressionWarning(UserWarning):
    """A share of the ceiling fell."""


def entries() -> list:
    found = []
    for name in names():
        benchmark = importlib.import_module(f"bench.{name}").BENCHMARK
        for case in (case for case in benchmark.cases[CASES] if case.main):
            ours = [p for p in benchmark.providers if p.kind == "ours" and absent(p, case, DEVICE) is None]
            # The reference only where it is what serves.
            for provider in [p for p in ours if p.backend != "reference"] or ours:
                found.append(pytest.param(name, case, provider, id=f"{name}-{case.label}-{provider.name}"))
    return found


@functools.cache
def recorded_shares() -> dict[tuple[str, str, str], float]:
    """(benchmark, case, provider) -> the recorded share of the ceiling; empty without a baseline."""
    path = record.ROOT / "bench" / "baselines" / f"{record.slug(DEVICE)}.jsonl"
    rows = record.rows_of([path]) if path.exists() else []
    return {
        (row["benchmark"], row["case"], row["provider"]): row["of_ceiling"]
        for row in rows
        if row.get("of_ceiling") is not None
    }


@pytest.mark.parametrize(("name", "case", "provider"), entries())
def test_speed(benchmark, name: str, case: Case, provider: Provider) -> None:
    bench_module = importlib.import_module(f"bench.{name}")
    torch.manual_seed(0)
    inputs = bench_module.BENCHMARK.inputs(case, DEVICE)
    ceiling = bench_module.BENCHMARK.ceilings(inputs)[0]
    clock = clock_for(DEVICE)
    ceiling_seconds: list[float] = []

    def setup() -> tuple[tuple, dict]:
        sample = clock.sample(Turn(run=lambda _: ceiling.run()))
        clock.settle()
        ceiling_seconds.append(sample())
        return (inputs if provider.prepare is None else provider.prepare(inputs),), {}

    def call(prepared: object) -> None:
        provider.run(prepared)
        clock.settle()

    with forced(provider.backend):
        try:
            call(setup()[0][0])
        except RuntimeError as error:
            if CANNOT not in str(error):
                raise
            pytest.skip(str(error))
        rounds = min(ROUNDS, case.repeats or ROUNDS)
        benchmark.pedantic(call, setup=setup, rounds=rounds, warmup_rounds=1)
    share = statistics.median(ceiling_seconds) / benchmark.stats.stats.median
    recorded = recorded_shares().get((name, case.label, provider.name))
    benchmark.extra_info |= {"ceiling": ceiling.name, "of_ceiling": share, "recorded": recorded}
    if recorded is None:
        warnings.warn(f"no baseline for {record.slug(DEVICE)}", RegressionWarning, stacklevel=1)
    elif share < recorded * (1 - ALLOWED_LOSS):
        warnings.warn(
            f"{provider.name} reaches {share:.0%} of {ceiling.name}, recorded {recorded:.0%}",
            RegressionWarning,
            stacklevel=1,
        )
