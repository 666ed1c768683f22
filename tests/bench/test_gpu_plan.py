"""What `make gpu` would run, in which order, where it goes, and what is said of it."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.__main__ import main, names
from bench.gpu import calls, command, counters, jobs, plan, trace
from bench.gpu.jobs import NOT_BEGUN, NOT_HERE, WELL, WRONG, Job, Result
from tests.patience import HANG_SECONDS

ROOT = Path(__file__).resolve().parents[2]
MOST_SECONDS = 600.0  # that a command may take on a lent machine
FILES = plan.files(Path("out"), "a-gpu")
HIDDEN = """
import sys

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name == "smopd._C":
            raise ModuleNotFoundError("No module named 'smopd._C'", name=name)

sys.meta_path.insert(0, Hide())
"""


def todo(name: str = "gpu") -> list[Job]:
    return command.PLANS[name](names(), FILES)


def test_the_order_is_that_of_what_one_would_miss_most() -> None:
    kinds = [one.name.split()[0] for one in todo()]
    assert list(dict.fromkeys(kinds)) == [
        *(
            "machine",
            "smoke",
            "memcheck",
            "racecheck",
            "time",
            "eager",
            "counters",
            "sweep",
            "pytest",
            "check",
        )
    ]
    timed = [one.name.removeprefix("time ") for one in todo() if one.name.startswith("time ")]
    assert timed == list(plan.TIMED) and set(timed) <= set(names())


@pytest.mark.parametrize("kind", ["smoke", "eager", "check"])
def test_no_benchmark_is_left_out(kind: str) -> None:
    assert {one.name for one in todo() if one.name.startswith(f"{kind} ")} == {f"{kind} {n}" for n in names()}


def test_nothing_is_timed_beside_another_job_or_compiled_by_torch() -> None:
    for stage in jobs.stages(todo()):
        if any(one.name.split()[0] in ("machine", "time", "eager", "counters", "sweep") for one in stage):
            assert len(stage) == 1
    for one in todo():
        if "bench" in one.command:
            assert one.command[one.command.index("--providers") + 1] in ("triton", "eager,triton", "ours")


@pytest.mark.parametrize("name", list(command.PLANS))
def test_the_time_is_enough_for_all_and_is_kept_whatever_hangs(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "tool", lambda name: f"/bin/{name}")
    assert jobs.expected_seconds(todo(name)) < plan.TOTAL_SECONDS
    assert jobs.most_seconds(todo(name), plan.TOTAL_SECONDS) < MOST_SECONDS - 20
    assert all(0 < one.expected < one.limit for one in todo(name))
    for one in todo(name):
        if "--deadline" in one.command:
            deadline = float(one.command[one.command.index("--deadline") + 1])
            assert one.expected <= deadline <= one.limit - plan.LAST_CASE_SECONDS + 1


@pytest.mark.parametrize("xdist", [True, False])
@pytest.mark.parametrize("missing", ["", "pytest", "hypothesis"])
def test_the_tests_run_in_many_processes_where_they_can(
    xdist: bool, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {"pytest", "hypothesis", *(["xdist"] if xdist else [])} - {missing}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in there else None)
    tests, huge = (next(one for one in todo() if one.name == f"pytest -m {mark}") for mark in ("gpu", "huge"))
    assert (" -n 8 --dist loadgroup" in tests.line) == (" -n 1 --dist loadgroup" in huge.line) == xdist
    assert tests.absent == huge.absent == (f"{missing} not installed" if missing else None)


def test_nvidias_tools_take_part_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for there in (True, False):
        monkeypatch.setattr(plan, "tool", lambda name, there=there: f"/opt/{name}" if there else None)
        kinds = ("memcheck", "racecheck", "counters")
        mine = [one for one in todo() if one.name.split()[0] in kinds]
        assert len(mine) >= 10 and {one.absent is None for one in mine} == {there}
    assert set(plan.COUNTED) == set(counters.WATCHED)
    kernels = {kernel for _, _, kernel in plan.SANITIZED} - {""}
    assert kernels <= set(shipped_kernels())


@pytest.mark.parametrize(("kernel", "call"), counters.WATCHED.values())
def test_what_is_counted_is_there(kernel: str, call: calls.Call) -> None:
    assert kernel in shipped_kernels()
    assert call.found()[0].cases["cuda"]


def shipped_kernels() -> list[str]:
    """Names of the Triton kernels."""
    texts = [path.read_text() for path in (ROOT / "kernels" / "triton").glob("*.py")]
    return [name for text in texts for name in re.findall(r"^def (\w*_?kernel)\(", text, re.MULTILINE)]


@pytest.mark.slow
def test_the_tests_are_collected_without_the_extension(tmp_path: Path) -> None:
    """A GPU machine has a checkout and no compiler's work."""
    (tmp_path / "hide_extension.py").write_text(HIDDEN)
    options = ["-q", "-m", "gpu", "--collect-only", "-p", "hide_extension", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *plan.TESTS],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "test_triton_large.py" in done.stdout


@pytest.mark.parametrize("name", list(command.PLANS))
def test_a_dry_run_shows_the_jobs_that_a_run_begins(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(command, "today", lambda: "2026-01-01")
    assert main([name, "--dry-run", str(tmp_path)]) == 0
    dry = capsys.readouterr().out
    begun: list[Job] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command.record, "slug", lambda device: "DEVICE")

    def note(todo: list[Job], *_: object) -> dict[str, Result]:
        begun.extend(todo)
        return {one.name: Result(WELL, "") for one in todo}

    monkeypatch.setattr(jobs, "run_jobs", note)
    assert main([name, str(tmp_path)]) == 0
    places = [dry.index(f"{one.name}\n{'':26}{one.line}\n") for one in begun]
    assert places == sorted(places) and begun
    total, most = jobs.expected_seconds(begun), jobs.most_seconds(begun, plan.TOTAL_SECONDS)
    assert dry.splitlines()[-1] == f"expected: {total:.0f} s in all; at most {most:.0f} s"
    assert capsys.readouterr().out.startswith(dry)  # a run says what it expects before it begins


@pytest.mark.slow
@pytest.mark.parametrize("target", list(command.PLANS))
def test_the_dry_run_of_make(target: str) -> None:
    make = shutil.which("make")
    if make is None:
        pytest.skip("make is not installed")
    line = [make, "-s", "--no-print-directory", target, "DRY_RUN=1", f"PYTHON={sys.executable}"]
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        [*line, "RESULTS=elsewhere"],
        cwd=ROOT,
        env=alone,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("expected: ")
    assert f"{ROOT / 'elsewhere'}/" in done.stdout


def test_what_comes_goes_to_the_folder_that_is_brought_back(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for given, folder in (("", ROOT / "bench" / "results"), (str(tmp_path), tmp_path)):
        monkeypatch.setenv(command.FOLDER, given)
        monkeypatch.chdir(ROOT)
        assert main(["gpu", "--dry-run"]) == 0
        assert f"--output {folder}/DEVICE-" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--dry"], ["one", "two"]])
def test_other_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu", *arguments]) == 2
    assert "expected [--dry-run] [FOLDER]" in capsys.readouterr().err


def test_without_a_gpu_the_gpu_suite_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["gpu"]) == 2
    assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ended", "status"),
    [
        ({}, 0),
        ({"pytest -m gpu": NOT_HERE}, 0),
        ({"check advantages": WRONG}, 1),
        ({"time smopd_loss": WRONG}, 1),
        ({"time topk_logprobs": NOT_BEGUN}, 1),
    ],
)
def test_the_exit_status_and_what_is_kept_and_said(
    ended: dict[str, str],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """The table is there after the first stage, though a row is left half written."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command.record, "slug", lambda device: "a-gpu")
    monkeypatch.setattr(command, "today", lambda: "2026-01-01")
    table = tmp_path / "a-gpu-2026-01-01.md"

    def fake(todo: list[Job], total: float, folder: Path, log: object, after_stage) -> dict[str, Result]:
        row = {"benchmark": "gemm", "case": "D2048", "provider": "gemm", "kind": "ceiling", "ms": 6.5}
        (tmp_path / "a-gpu-2026-01-01.jsonl").write_text(json.dumps(row) + '\n{"benchmark": "adv')
        after_stage()
        assert "gemm D2048: 6.5 ms" in table.read_text()
        return {one.name: Result(ended.get(one.name, WELL), "") for one in todo}

    monkeypatch.setattr(jobs, "run_jobs", fake)
    assert main(["gpu", str(tmp_path)]) == status
    printed = capsys.readouterr()
    for name, state in ended.items():
        assert any(line.startswith(f"{state}: ") and name in line for line in printed.err.splitlines())
    assert str(table) in printed.err and table.read_text() in printed.out


def test_every_peer_is_in_the_plan_of_peers() -> None:
    with_peers = {
        name
        for name in names()
        if any(p.kind == "peer" for p in importlib.import_module(f"bench.{name}").BENCHMARK.providers)
    }
    assert set(plan.PEERS) == with_peers
    kinds = [one.name.split()[0] for one in todo("gpu-peers")]
    assert kinds == ["machine", "trace", *["peers"] * len(with_peers)]


def test_a_trace_is_summed_by_name() -> None:
    told = trace.summary([("fill", 1.5), ("row_kernel", 1300.0), ("fill", 2.0)])
    assert told == {"launches": 3, "kernels": [["row_kernel", 1, 1300.0], ["fill", 2, 3.5]]}
    assert trace.CALL.found()
