"""The benchmarks' command at tiny sizes: rows, refusals, what is absent, tables, timing and memory."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import importlib.util
import json
import math
import os
import time
from pathlib import Path

import pytest
import torch

from bench import topk_logprobs
from bench.__main__ import main, names
from bench.harness import accuracy, memory, record, report, timing
from bench.harness.providers import ENV, ours, peer
from bench.harness.run import Options, run_benchmarks
from bench.harness.types import Case, Expected, Provider
from smopd.kernels.dispatch import cpp_unavailable

WITHOUT_COMPILE = ["--device", "cpu", "--providers", "eager,ours,peer"]


def rows(capsys: pytest.CaptureFixture[str]) -> list[dict]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def run(providers: tuple[Provider, ...], device: str = "cpu") -> tuple[int, list[dict]]:
    """How many of ours were refused, and the rows, of topk_logprobs' quick cases with these providers."""
    told: list[dict] = []
    benchmark = dataclasses.replace(topk_logprobs.BENCHMARK, providers=providers)
    options = Options(device=device, case_set="quick", seconds=0.001)
    return run_benchmarks({"topk_logprobs": benchmark}, options, told.append), told


def test_the_benchmarks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == names()
    assert {"topk_logprobs", "smopd_loss", "linear_smopd_loss", "advantages"} <= set(names())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["topk"], "no benchmark 'topk', expected some of"),
        (["table", "no-such-file"], "no-such-file"),
        (["table"], "a file is expected"),
        (["plot"], "a file is expected"),
    ],
)
def test_arguments_that_make_no_sense(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", names())
def test_every_benchmark_runs_and_is_right(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV, "reference")
    assert main([name, "--quick", *WITHOUT_COMPILE]) == 0
    assert os.environ[ENV] == "reference"
    found = rows(capsys)
    assert not [row for row in found if "refused" in row]
    timed = [row for row in found if "ms" in row]
    cases = {row["case"] for row in found}
    for case in cases:
        providers = {row["provider"]: row["kind"] for row in timed if row["case"] == case}
        assert "reference" in providers and {"eager", "ceiling", "ours"} <= set(providers.values())
    for row in timed:
        assert 0 < row["p20_ms"] <= row["ms"] <= row["p80_ms"]
        assert row["device"] and row["threads"] >= 1 and row["torch"] == torch.__version__
        if row["kind"] != "ceiling":
            assert row["of_ceiling"] > 0 and row["times_eager"] > 0
            kernel = row["kind"] == "ours" and not row["provider"].startswith("reference")
            assert 0 <= row["of_bound"] <= (1 if kernel else math.inf)
    assert [row["times_eager"] for row in timed if row["kind"] == "eager"].count(1.0) >= len(cases)


@pytest.mark.parametrize("name", names())
def test_hard_shapes_are_checked_without_a_time(name: str) -> None:
    benchmark = importlib.import_module(f"bench.{name}").BENCHMARK
    small = tuple(case for case in benchmark.cases["check"] if case.N * max(case.V, 1) <= 100_000)
    told: list[dict] = []
    options = Options(device="cpu", case_set="check", providers=("eager", "ours"))
    assert (
        run_benchmarks({name: dataclasses.replace(benchmark, cases={"check": small})}, options, told.append)
        == 0
    )
    assert len([row for row in told if "of_bound" in row]) >= 2 * len(small) > 0
    assert not [row for row in told if "ms" in row or "refused" in row]


@pytest.mark.skipif(cpp_unavailable() is not None, reason="smopd._C is not built")
def test_the_backends_are_forced_each_in_its_rows() -> None:
    seen = []

    def spy(given: topk_logprobs.Inputs) -> dict:
        seen.append(os.environ[ENV])
        return topk_logprobs.run(topk_logprobs.fused)(given)

    refused, told = run(ours(spy))
    assert refused == 0
    assert [row["provider"] for row in told if row["kind"] == "ours"] == ["reference", "cpp"] * 2
    assert set(seen) == {"reference", "cpp"}


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (lambda ids, logps: (ids, logps + 1e-3), r"logps is off by 0.001 at most"),
        (lambda ids, logps: (ids, logps * float("nan")), r"logps is off by nan"),
        (lambda ids, logps: (ids.flip(-1), logps), r"ids differs in"),
        (lambda ids, logps: (ids, logps[:, 1:]), r"logps has shape"),
    ],
)
def test_a_wrong_result_is_refused_and_the_rest_goes_on(wrong, reason: str) -> None:
    bad = ours(topk_logprobs.run(lambda *a: wrong(*topk_logprobs.fused(*a))), backends=("reference",))
    good = ours(topk_logprobs.run(topk_logprobs.fused), "again", backends=("reference",))
    refused, told = run((*bad, *good))
    assert refused == 2
    assert all(reason in row["refused"] and "ms" not in row for row in told if row["provider"] == "reference")
    assert sum("refused" in row for row in told) == 2
    assert [row["provider"] for row in told if "ms" in row and row["kind"] == "ours"] == [
        "reference again"
    ] * 2


needs_glibc = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallopt"), reason="memory is poisoned through glibc"
)


@needs_glibc
def test_zeros_that_were_never_written_are_refused() -> None:
    """Pages fresh from the system are zeros, and here zeros are right."""
    n_zeros = 16 << 20
    benchmark = dataclasses.replace(
        topk_logprobs.BENCHMARK,
        providers=ours(lambda given: {"logps": torch.empty(n_zeros)}, backends=("reference",)),
        cases={"check": (Case(N=1, V=7, kappa=1),)},
        truth=lambda given: {"logps": Expected(torch.zeros(n_zeros), 1e-3)},
    )
    told: list[dict] = []
    options = Options(device="cpu", case_set="check")
    assert run_benchmarks({"topk_logprobs": benchmark}, options, told.append) == 1
    assert told[0]["refused"].startswith("logps is off by 1.5 at most")


@needs_glibc
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32])
@pytest.mark.parametrize("n_elements", [60, 5000, 16 << 20])
def test_new_memory_is_poisoned(n_elements: int, dtype: torch.dtype) -> None:
    with accuracy.poisoned_memory(torch.zeros(1)):
        kept = torch.zeros(n_elements, dtype=dtype)
        del kept  # its memory is free, and may come again
        new = torch.empty(n_elements, dtype=dtype)[8:]  # the allocator's own words lie at the beginning
        poison = new.view(torch.uint8)[-1].clone()
        assert bool((new.view(torch.uint8) == poison).all()) and bool(poison)
    if n_elements > 1 << 20:
        freed = torch.full((n_elements,), 7, dtype=dtype)
        del freed
        after = torch.empty(n_elements, dtype=dtype)[8:]  # zeros fresh from the system, or sevens
        assert not bool((after.view(torch.uint8) == poison).all()), "still poisoned"


def test_what_raises_is_refused_in_ours_and_left_out_in_peers() -> None:
    def broken(given: object) -> dict:
        raise RuntimeError("no kernel image")

    refused, told = run((*ours(broken, backends=("reference",)), peer("theirs", broken)))
    assert refused == 2
    assert [row.get("refused") for row in told if row["kind"] == "ours"] == [
        "RuntimeError: no kernel image"
    ] * 2
    assert {row["left_out"] for row in told if row["kind"] == "peer"} == {"RuntimeError: no kernel image"}


def test_what_is_not_here_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    form = topk_logprobs.run(topk_logprobs.fused)
    missing = peer("theirs", form, "no_such_module_anywhere")
    elsewhere = peer("on a GPU", form, devices=("cuda",))
    unserved = Provider(name="cpp", run=form, kind="ours", backend="triton")
    refused, told = run((missing, elsewhere, unserved))
    reasons = {row["provider"]: row["left_out"] for row in told if "left_out" in row}
    assert refused == 0
    assert reasons["theirs"] == "no_such_module_anywhere is not installed"
    assert reasons["on a GPU"] == "needs cuda"
    assert "cpu" in reasons["cpp"] and "RuntimeError" not in reasons["cpp"]


def test_after_the_deadline_cases_are_left_out() -> None:
    told: list[dict] = []
    options = Options(device="cpu", case_set="quick", deadline=time.monotonic() - 1)
    assert run_benchmarks({"topk_logprobs": topk_logprobs.BENCHMARK}, options, told.append) == 0
    assert len(told) == 2 and all("is over" in row["left_out"] for row in told)


def test_rows_go_to_a_file_and_come_back_as_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "deep" / "rows.jsonl"
    assert main(["advantages", "--quick", *WITHOUT_COMPILE, "--output", str(file)]) == 0
    assert rows(capsys) == record.rows_of([file])
    assert main(["table", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "**advantages**, N12-K2-G4-fp32" in printed
    assert "| reference |" in printed and "| eager by prompt |" in printed


def test_a_table_shows_refusals_and_what_a_peer_computes() -> None:
    refused = {"provider": "a", "refused": "ids differ", "kind": "ours"}
    part = {"provider": "b", "computes": "a part", "ms": 1234.5, "p20_ms": 1.0, "p80_ms": 2.0, "kind": "peer"}
    assert report.cells(refused)[:2] == ("a", "refused: ids differ")
    assert report.cells(part)[:3] == ("b (a part)", "1,234", "1 to 2")


def test_a_line_that_is_no_row_is_named(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"ms": 1}\n[1]\n')
    with pytest.raises(ValueError, match=r"rows.jsonl:2: list, expected a row"):
        record.rows_of([file])


def test_turns_are_taken_in_rounds_each_first_once() -> None:
    order: list[str] = []
    turns = {name: timing.Turn(run=lambda _, name=name: order.append(name)) for name in "abc"}
    times = timing.interleaved(turns, timing.CpuClock(), seconds=0.0, rounds=3)
    assert "".join(order) == "abc" + "bca" + "cab"
    assert all(len(samples.seconds) == 3 for samples in times.values())


def test_where_the_time_decides_on_the_rounds_a_warm_up_and_a_trial_come_first() -> None:
    runs: list[None] = []
    turns = {"a": timing.Turn(run=lambda _: runs.append(None))}
    times = timing.interleaved(turns, timing.CpuClock(), seconds=0.0)["a"]
    assert len(times.seconds) == timing.MIN_ROUNDS == len(runs) - 2


def test_preparation_is_not_timed() -> None:
    slow = timing.Turn(run=lambda _: None, prepare=lambda: time.sleep(0.05))
    times = timing.interleaved({"slow": slow}, timing.CpuClock(), seconds=0.0, rounds=3)["slow"]
    assert max(times.seconds) < 0.05


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="memory is measured through Linux's /proc"
)
def test_peak_memory_counts_what_lives_at_once() -> None:
    given = torch.ones(8 << 20)  # 32 MiB
    one = memory.peak_bytes(lambda: given * 2, "cpu")
    two = memory.peak_bytes(lambda: (given * 2) * 2, "cpu")
    assert one is not None and two is not None
    assert abs(one / 2**20 - 32) < 8 and abs(two / 2**20 - 64) < 8


def test_bounds_are_judged_by_share_and_slack() -> None:
    provider = peer("theirs", lambda given: {}, slack=10.0)
    truth = {"x": Expected(torch.zeros(2), torch.tensor([1.0, 2.0]))}
    fault, errors, share = accuracy.judge(provider, {"x": torch.tensor([3.0, 4.0])}, truth)
    assert fault is None and errors == {"x": 4.0} and math.isclose(share, 3.0)
    fault, *_ = accuracy.judge(provider, {"x": torch.tensor([11.0, 0.0])}, truth)
    assert fault is not None and "x is off by 11" in fault
    fault, *_ = accuracy.judge(provider, {"y": torch.zeros(2)}, truth)
    assert fault is not None and "expected some of ['x']" in fault


@pytest.mark.parametrize(
    ("value", "dtype", "want"),
    [(1.0, torch.bfloat16, 2.0**-7), (1.5, torch.float32, 2.0**-23), (-0.75, torch.bfloat16, 2.0**-8)],
)
def test_ulp(value: float, dtype: torch.dtype, want: float) -> None:
    assert float(accuracy.ulp(torch.tensor(value, dtype=torch.float64), dtype)) == want


def test_infinities_that_agree_are_no_error() -> None:
    provider = ours(lambda given: {}, backends=("reference",))[0]
    value = torch.tensor([-math.inf, 1.0])
    assert accuracy.judge(provider, {"x": value}, {"x": Expected(value, 1e-6)})[0] is None
    fault, *_ = accuracy.judge(provider, {"x": torch.tensor([0.0, 1.0])}, {"x": Expected(value, 1e-6)})
    assert fault is not None


def test_labels() -> None:
    case = Case(N=8, V=16, M=2, kappa=4, dtype="bfloat16", flags=("tail",))
    assert case.label == "N8-V16-M2-kappa4-bf16-tail"


def test_a_plot_is_drawn_or_matplotlib_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"benchmark": "b", "case": "c", "provider": "p", "kind": "ours", "ms": 2.0, "p20_ms": 1.0}
    file, image = tmp_path / "rows.jsonl", tmp_path / "plot.png"
    file.write_text(json.dumps(row | {"p80_ms": 3.0, "of_ceiling": 0.5, "ceiling": "copy"}) + "\n")
    status = main(["plot", str(file), str(image)])
    if importlib.util.find_spec("matplotlib") is None:
        assert status == 2 and "matplotlib is not installed" in capsys.readouterr().err
    else:
        assert status == 0 and image.stat().st_size > 1000


@pytest.mark.parametrize("name", names())
def test_every_benchmark_has_cases_for_both_devices_and_one_main_case(name: str) -> None:
    cases = importlib.import_module(f"bench.{name}").BENCHMARK.cases
    assert set(cases) == {"cpu", "cuda", "quick", "check"}
    for kind in ("cpu", "cuda", "quick"):
        assert [case.main for case in cases[kind]].count(True) == 1
        assert len({case.label for case in cases[kind]}) == len(cases[kind])
