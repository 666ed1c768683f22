"""The benchmarks: a wrong row is refused and not timed, ceilings are timed in turn, rows say where from."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bench import linear_smopd_loss, smopd_loss, teacher_mixture, topk_forward_kl, topk_logprobs
from bench.harness import accuracy, memory, record, truth
from bench.harness.inputs import head_logits, on_head
from bench.harness.providers import ENV, ours, peer
from bench.harness.run import Setting, checked, timed
from bench.harness.timing import Clock
from bench.harness.types import Case, Expected, Outputs, Provider
from smopd.kernels.dispatch import cpp_unavailable
from tests.patience import HANG_SECONDS

N_ROWS, WRONG_ROW = 60, 31
TOPK = topk_logprobs.BENCHMARKS["topk_logprobs"]
FORMS = {
    "smopd_loss": (smopd_loss.BENCHMARKS, smopd_loss.run(smopd_loss.fused)),
    "topk_forward_kl": (topk_forward_kl.BENCHMARKS, topk_forward_kl.run(topk_forward_kl.fused)),
    "linear_smopd_loss": (linear_smopd_loss.BENCHMARKS, linear_smopd_loss.run(linear_smopd_loss.fused)),
}


def setting(name: str, benchmark=TOPK, dtype: str = "float32", **sizes: int) -> Setting:
    case = Case(**{"N": N_ROWS, "V": 50, "D": 0, "kappa": 4} | sizes, dtype=dtype)
    return Setting(name, benchmark, case, "cpu")


def judged(run: Callable) -> dict:
    """The row of the reference with this call, in topk_logprobs' case."""
    (provider,) = ours(run, backends=("reference",))
    return checked(setting("topk_logprobs"), provider)


@pytest.mark.parametrize(
    ("form", "name", "dtype"),
    [
        ("smopd_loss", "logp", "float32"),
        ("smopd_loss", "kl", "float32"),
        ("smopd_loss", "entropy", "bfloat16"),
        ("smopd_loss", "loss", "float32"),
        ("smopd_loss", "dlogits", "bfloat16"),
        ("topk_forward_kl", "dlogits", "float32"),
        ("linear_smopd_loss", "logp", "float32"),
        ("linear_smopd_loss", "kl", "bfloat16"),
        ("linear_smopd_loss", "dhidden", "float32"),
        ("linear_smopd_loss", "dhidden", "bfloat16"),
        ("linear_smopd_loss", "dweight", "float32"),
    ],
)
def test_one_wrong_row_is_refused(form: str, name: str, dtype: str) -> None:
    benchmarks, run = FORMS[form]

    def spoiled(given: object) -> Outputs:
        """One row of one output is another row's."""
        outputs = run(given)
        value = outputs[name].clone()
        if value.ndim:
            value[WRONG_ROW] = value[WRONG_ROW - 1]
        else:
            value += 1e-3
        return outputs | {name: value}

    def row(call: Callable) -> dict:
        provider = Provider(name="as a kernel is judged", run=call, kind="ours")
        return checked(setting(form, benchmarks[form], dtype, D=16 if "linear" in form else 0), provider)

    assert "refused" not in row(run)
    wrong = row(spoiled)
    assert wrong["refused"].startswith(f"{name} is off by") and "ms" not in wrong


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (lambda ids, logps: (ids, logps + 1e-3), "logps is off by 0.001"),
        (lambda ids, logps: (ids, logps * float("nan")), "logps is off by nan"),
        (lambda ids, logps: (ids.flip(-1), logps), "ids differs in"),
        (lambda ids, logps: (ids, logps[:, 1:]), "logps has shape"),
    ],
)
def test_a_wrong_result_of_topk_is_refused(wrong: Callable, reason: str) -> None:
    row = judged(topk_logprobs.run(lambda *given: wrong(*topk_logprobs.fused(*given))))
    assert row["refused"].startswith(reason) and "peak_mib" not in row


def test_a_wrong_id_of_a_mixture_is_refused_where_its_place_is_sure() -> None:
    benchmark = teacher_mixture.BENCHMARKS["teacher_mixture"]
    call = next(p.run for p in benchmark.providers if p.backend == "reference")

    def swapped(given: teacher_mixture.Inputs) -> Outputs:
        outputs = call(given)
        return outputs | {"ids": outputs["ids"].roll(1, -1)}

    for run, refused in ((call, False), (swapped, True)):
        (provider,) = ours(run, backends=("reference",))
        assert ("refused" in checked(setting("mixture", benchmark, V=0, M=2), provider)) == refused
    values = torch.tensor([[0.0, -1e-6, -1.0, -2.0]], dtype=torch.float64)
    assert accuracy.clear_places(values, 3).tolist() == [[False, False, True]]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="memory is poisoned through glibc")
def test_memory_that_was_never_written_is_refused() -> None:
    """Pages fresh from the system are zeros, and here zeros are right."""
    n_zeros = 16 << 20
    zeros = dataclasses.replace(TOPK, truth=lambda given: {"logps": Expected(torch.zeros(n_zeros), 1e-3)})
    (provider,) = ours(lambda given: {"logps": torch.empty(n_zeros)}, backends=("reference",))
    assert checked(setting("zeros", zeros, N=1), provider)["refused"].startswith("logps is off by 1.5")


def test_what_raises_is_refused_in_ours_and_left_out_in_peers() -> None:
    def broken(given: object) -> Outputs:
        raise RuntimeError("no kernel image")

    assert judged(broken)["refused"] == "RuntimeError: no kernel image"
    assert checked(setting("topk"), peer("theirs", broken))["left_out"] == "RuntimeError: no kernel image"
    absent = peer("theirs", broken, "no_such_module_anywhere")
    assert checked(setting("topk"), absent)["left_out"] == "no_such_module_anywhere is not installed"


def test_eager_forms_may_round_and_may_not_compute_something_else() -> None:
    value = torch.ones(100, dtype=torch.float64)
    expected = {"x": Expected(value, 1e-6)}
    for kind, off, wrong in (("ours", 1e-3, True), ("eager", 1e-3, False), ("eager", 0.6, True)):
        provider = Provider(name="x", run=lambda given: {}, kind=kind)
        fault, *_ = accuracy.judge(provider, {"x": value + off}, expected)
        assert (fault is not None) == wrong
    fault, *_ = accuracy.judge(
        Provider(name="x", run=lambda given: {}), {"x": value * float("nan")}, expected
    )
    assert fault is not None


@pytest.mark.skipif(cpp_unavailable() is not None, reason="smopd._C is not built")
def test_each_backend_is_forced_in_its_rows() -> None:
    seen = []

    def spy(given: topk_logprobs.Inputs) -> Outputs:
        seen.append(os.environ[ENV])
        return topk_logprobs.run(topk_logprobs.fused)(given)

    for provider in ours(spy, backends=("reference", "cpp")):
        assert "refused" not in checked(setting("topk"), provider)
    assert seen == ["reference", "reference", "cpp", "cpp"]


def test_the_ceiling_is_timed_in_turn_and_the_input_is_made_anew() -> None:
    order: list[str] = []
    at, clock = setting("topk"), Clock("cpu")
    ceiling = dataclasses.replace(at.ceiling, run=lambda: order.append("ceiling"))
    object.__setattr__(at, "ceiling", ceiling)
    provider = Provider(
        name="x",
        run=lambda prepared: order.append("run") or {},
        prepare=lambda inputs: order.append("prepare"),
    )

    def pedantic(call: Callable, setup: Callable, rounds: int) -> list[float]:
        assert rounds >= 3
        order.clear()
        for _ in range(3):
            (prepared,), _ = setup()
            before = clock.read()
            call(prepared)
            assert clock.read() > before
        return [2.0, 4.0, 6.0]

    row = timed(at, provider, clock, 0.0, pedantic)
    assert order == ["ceiling", "prepare", "run"] * 3
    assert row["ms"] == 4000 and row["ceiling"] == "read" and row["repeats"] == 3 and row["of_ceiling"] > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_truth_of_a_head_is_made_in_float64(dtype: str) -> None:
    torch.manual_seed(0)
    scenario = on_head(Case(N=5, V=40, D=8, kappa=3, dtype=dtype), "cpu")
    exact = scenario.hidden_ND.double() @ scenario.weight_VD.double().T
    wanted = exact if dtype == "float32" else exact.bfloat16().double()
    found = head_logits(scenario.hidden_ND, scenario.weight_VD)
    torch.testing.assert_close(found, wanted, rtol=1e-14, atol=1e-13)
    names = ("logp", "kl", "loss", "dhidden", "dweight")
    assert {truth.loss_truth(scenario)[name].value.dtype for name in names} == {torch.float64}


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="memory is measured through Linux's /proc"
)
def test_peak_memory_counts_what_lives_at_once() -> None:
    given = torch.ones(8 << 20)  # 32 MiB
    one = memory.peak_bytes(lambda: given * 2, "cpu")
    two = memory.peak_bytes(lambda: (given * 2) * 2, "cpu")
    assert one is not None and two is not None
    assert abs(one / 2**20 - 32) < 8 and abs(two / 2**20 - 64) < 8


SPOILED = """
import bench.advantages as bench
right = bench.gdpo_advantages
bench.gdpo_advantages = lambda *given, **options: right(*given, **options) + 1e-3
"""


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [False, True])
def test_pytest_bench(wrong: bool, repository_root: Path, tmp_path: Path) -> None:
    """The front door: one table, rows with where they were measured, and a failure where ours is wrong."""
    pytest.importorskip("pytest_benchmark", reason="needs pytest-benchmark")
    (tmp_path / "spoiled.py").write_text(SPOILED if wrong else "")
    rows = tmp_path / "deep" / "rows.jsonl"
    options = ("--smopd-cases", "quick", "--smopd-seconds", "0.01", "--smopd-output", str(rows))
    command = [sys.executable, "-m", "pytest", "bench", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        [*command, "-p", "spoiled", "-k", "advantages and not compile", *options],
        cwd=repository_root,
        env=outer | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{repository_root}"},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == int(wrong), done.stdout[-3000:]
    found = record.rows_of(rows)
    assert {"eager", "reference"} == {row["provider"] for row in found}
    for row in found:
        assert row["device"] and row["torch"] == torch.__version__ and row["python"] and "commit" in row
        if wrong and row["kind"] == "ours":
            assert row["refused"].startswith("advantages is off by") and "ms" not in row
        else:
            assert 0 < row["p20_ms"] <= row["ms"] <= row["p80_ms"] and row["of_ceiling"] > 0
    assert done.stdout.count("| advantages N") == len(found)


def test_stored_rows_are_shown_as_a_table(repository_root: Path, capsys) -> None:
    from bench.harness import report

    for path in sorted((repository_root / "bench" / "baselines").glob("*.jsonl")):
        lines = list(report.table(record.rows_of(path)))
        assert len(lines) == 3 + len(path.read_text().splitlines())


def test_a_line_that_is_no_row_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"ms": 1}\n[1]\n')
    with pytest.raises(ValueError, match=r"rows.jsonl:2: not a row"):
        record.rows_of(tmp_path / "rows.jsonl")


def test_the_plan_for_a_gpu_is_shown_on_any_machine(repository_root: Path, tmp_path: Path) -> None:
    script = repository_root / "bench" / "gpu" / "run.sh"

    def said(part: str, code: int, **environment: str) -> str:
        command = ["bash", str(script), part]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
        assert done.returncode == code, done.stderr
        return done.stdout

    for part, jobs in (("1", 3), ("2", 2), ("3", 3)):
        assert len(said(part, 0, DRY_RUN="1").splitlines()) == jobs
    said("4", 2)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho $SMOPD_BENCH_OUTPUT; exit 3\n")
    python.chmod(0o755)
    assert "2-readers: exit status 3" in said("2", 1, PYTHON=str(python), OUT=str(tmp_path))
    assert (tmp_path / "2-step.log").read_text() == f"{tmp_path}/rows.jsonl\n"
