"""`pytest bench`: check every provider of every operation against float64, then time it.

    pytest bench -k topk_logprobs                 one operation
    pytest bench -k "smopd_loss and (cpp or eager)"
    pytest bench --smopd-output rows.jsonl        write rows, which `python -m bench rows.jsonl` shows

If a result of ours is wrong, the test fails without timing. Providers that are not installed are skipped.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from bench.harness.record import DEVICE
from bench.harness.run import Clock, Setting, checked, timed
from bench.harness.types import Benchmark, Case, Provider

pytest.importorskip("pytest_benchmark", reason="needs pytest-benchmark (the bench extra)")

MODULES = ("losses", "topk_logprobs", "topk_forward_kl", "teacher_mixture", "advantages")
BENCHMARKS = {
    name: benchmark
    for module in MODULES
    for name, benchmark in importlib.import_module(f"bench.{module}").BENCHMARKS.items()
}
CHECKED_ROWS = 64
QUICK = {"N": 32, "V": 1271, "D": 16, "kappa": 8}  # upper limits
CLOCK = Clock(DEVICE)


@dataclass(frozen=True)
class Entry:
    name: str
    case: Case
    provider: Provider

    def __str__(self) -> str:
        return f"{self.name}-{self.case.label}-{self.provider.name}"


def cases_of(benchmark: Benchmark, chosen: str) -> list[Case]:
    """Return the cases for "cpu" or "cuda", or for "quick" small versions of those for "cpu"."""
    if chosen != "quick":
        return list(benchmark.cases[chosen])
    small = [
        replace(case, repeats=None, **{name: min(most, getattr(case, name)) for name, most in QUICK.items()})
        for case in benchmark.cases["cpu"]
    ]
    return list({case.label: case for case in reversed(small)}.values())[::-1]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cases = metafunc.config.getoption("smopd_cases")
    entries = [
        Entry(name, case, provider)
        for name, benchmark in BENCHMARKS.items()
        for case in cases_of(benchmark, cases)
        for provider in benchmark.providers
        if DEVICE in provider.devices and (case.main or not provider.main_only)
    ]
    entries.sort(key=lambda entry: not entry.case.main)  # main cases first
    metafunc.parametrize("entry", entries, ids=str)


@functools.lru_cache(maxsize=1)
def setting_of(name: str, case: Case) -> Setting:
    return Setting(name, BENCHMARKS[name], case, DEVICE)


@pytest.mark.benchmark(timer=CLOCK.read, disable_gc=True)
def test_operation(entry: Entry, request: pytest.FixtureRequest, tell: Callable[[dict], None]) -> None:
    only_check = request.config.getoption("smopd_check")
    case = replace(entry.case, N=min(entry.case.N, CHECKED_ROWS)) if only_check else entry.case
    setting = setting_of(entry.name, case)
    row = checked(setting, entry.provider)
    if "refused" in row:
        tell(row)
        if entry.provider.kind == "ours":
            pytest.fail(f"{entry}: {row['refused']}", pytrace=False)
        pytest.skip(row["refused"])
    if "left_out" in row:
        tell(row)
        pytest.skip(row["left_out"])
    if not only_check:
        benchmark = request.getfixturevalue("benchmark")

        def pedantic(call: Callable, setup: Callable, rounds: int) -> list[float]:
            benchmark.pedantic(call, setup=setup, rounds=rounds)
            return benchmark.stats.stats.sorted_data

        row |= timed(setting, entry.provider, CLOCK, request.config.getoption("smopd_seconds"), pedantic)
        benchmark.extra_info |= row
    tell(row)
