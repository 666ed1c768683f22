"""`pytest bench`: its entries run on every benchmark, and a share of the ceiling that fell is a warning."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("pytest_benchmark", reason="pytest-benchmark is not installed")

from bench import test_speed, topk_logprobs
from bench.__main__ import names
from bench.harness import record
from bench.harness.providers import ours
from smopd.kernels.dispatch import cpp_unavailable
from tests.patience import HANG_SECONDS

needs_cpp = pytest.mark.skipif(cpp_unavailable() is not None, reason="smopd._C is not built")


@needs_cpp
@pytest.mark.slow
def test_every_entry_runs(repository_root: Path, tmp_path: Path) -> None:
    """At tiny sizes, in a process of its own: a pytest in a pytest."""
    saved = tmp_path / "speed.json"
    code = (
        "import os, sys, pytest\n"
        "os.environ['SMOPD_BENCH_CASES'] = 'quick'\n"
        "options = ['-q', '-W', 'ignore', '-p', 'no:cacheprovider', '-p', 'no:xdist']\n"
        f"sys.exit(pytest.main([*options, 'bench/test_speed.py', '--benchmark-json', {str(saved)!r}]))\n"
    )
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=repository_root,
        env=outer,  # pytest-benchmark times nothing under xdist, whose worker this may be
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    timed = json.loads(saved.read_text())["benchmarks"]
    ran = {entry["name"].partition("[")[2].partition("-")[0] for entry in timed}
    assert ran == set(names())
    assert all(entry["extra_info"]["of_ceiling"] > 0 for entry in timed)


class Clockwork:
    """pytest-benchmark's fixture with a known median: each call takes as long as it is told."""

    def __init__(self, seconds: float) -> None:
        self.stats = SimpleNamespace(stats=SimpleNamespace(median=seconds))
        self.extra_info: dict = {}

    def pedantic(self, call, setup, rounds: int, warmup_rounds: int) -> None:
        for _ in range(rounds):
            (prepared,), _ = setup()
            call(prepared)


def run_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recorded: float | None) -> Clockwork:
    """test_speed with a ceiling and a call of 1 s each, beside a baseline that recorded this share."""
    monkeypatch.setattr(record, "ROOT", tmp_path)
    case = topk_logprobs.BENCHMARK.cases["quick"][0]
    (provider,) = ours(topk_logprobs.run(topk_logprobs.fused), backends=("reference",))
    if recorded is not None:
        row = {"benchmark": "topk_logprobs", "case": case.label, "provider": provider.name}
        path = tmp_path / "bench" / "baselines" / f"{record.slug(test_speed.DEVICE)}.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(row | {"of_ceiling": recorded}) + "\n")
    test_speed.recorded_shares.cache_clear()
    clock = SimpleNamespace(sample=lambda turn: lambda: 1.0, settle=lambda: None)
    monkeypatch.setattr(test_speed, "clock_for", lambda device: clock)
    benchmark = Clockwork(1.0)
    try:
        test_speed.test_speed(benchmark, "topk_logprobs", case, provider)
    finally:
        test_speed.recorded_shares.cache_clear()
    return benchmark


@pytest.mark.parametrize("recorded", [1.18, 2.0])
def test_a_share_that_fell_by_more_than_15_percent_is_a_warning(
    recorded: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = rf"reference reaches 100% of .*, recorded {recorded:.0%}"
    with pytest.warns(test_speed.RegressionWarning, match=said):
        benchmark = run_with(monkeypatch, tmp_path, recorded)
    assert benchmark.extra_info["of_ceiling"] == 1.0 and benchmark.extra_info["recorded"] == recorded


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("recorded", [0.5, 1.0, 1.17])
def test_a_smaller_loss_is_none(recorded: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run_with(monkeypatch, tmp_path, recorded)


def test_no_baseline_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.warns(test_speed.RegressionWarning, match="no baseline for"):
        run_with(monkeypatch, tmp_path, None)
