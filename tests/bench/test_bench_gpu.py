"""What `make gpu` would run, how its jobs are held to their limits, and what it says of each."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.__main__ import main, names
from bench.harness import gpu, job_runner
from bench.harness.job_runner import NOT_BEGUN, NOT_HERE, WELL, WRONG, Job, Result
from tests.patience import HANG_SECONDS, MISSED_SECONDS

ROOT = Path(__file__).resolve().parents[2]
MOST_SECONDS = 480.0
# A child that outlives its parent unless it is killed; its number is in the file.
HANGS = """
import pathlib, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"],
                         stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
child.stdout.readline()
place = pathlib.Path("child")
place.with_suffix(".new").write_text(str(child.pid))
print("begun", flush=True)
place.with_suffix(".new").rename(place)
child.wait()
"""


def job(code: str, name: str = "one", stage: int = 1, limit: float = HANG_SECONDS, **more) -> Job:
    return Job(stage, name, (sys.executable, "-c", code), 1.0, limit, **more)


def run(folder: Path, *jobs: Job, total: float = HANG_SECONDS) -> dict[str, Result]:
    return job_runner.run_jobs(jobs, total, folder)


def until(happens: Callable[[], bool]) -> None:
    ends = time.monotonic() + HANG_SECONDS
    while not happens():
        assert time.monotonic() < ends
        time.sleep(0.01)


def gone(process: int) -> bool:
    """Whether it has ended, though no one may have reaped it."""
    try:
        os.kill(process, 0)
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (ProcessLookupError, FileNotFoundError):
        return True


pytestmark = pytest.mark.skipif(not hasattr(os, "waitid"), reason="jobs are watched by waitid")
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are seen in /proc")


def plan(output: Path = Path("rows.jsonl")) -> list[Job]:
    return gpu.jobs(names(), output)


def test_every_benchmark_is_checked_and_then_timed_alone() -> None:
    by_stage = job_runner.stages(plan())
    assert [one.name for one in by_stage[0]] == ["pytest -m gpu", *(f"check {name}" for name in names())]
    assert [[one.name for one in stage] for stage in by_stage[1:]] == [[f"time {name}"] for name in names()]
    for one in by_stage[0][1:]:
        assert "--check" in one.command
    for (one,) in by_stage[1:]:
        assert "--check" not in one.command


def test_no_benchmark_begins_a_case_that_its_limit_would_cut_at_once() -> None:
    for one in plan():
        if "--deadline" in one.command:
            deadline = float(one.command[one.command.index("--deadline") + 1])
            assert 0 < deadline <= one.limit - gpu.LAST_CASE_SECONDS


def test_the_time_is_enough_for_all_and_is_kept_whatever_hangs() -> None:
    """Where a check hangs too, every timing has its expected time."""
    jobs = plan()
    checks, *timings = job_runner.stages(jobs)
    before = max(one.limit for one in checks)
    assert (
        before + job_runner.expected_seconds([one for stage in timings for one in stage]) < gpu.TOTAL_SECONDS
    )
    assert job_runner.expected_seconds(jobs) < job_runner.most_seconds(jobs, gpu.TOTAL_SECONDS) < MOST_SECONDS
    assert gpu.TOTAL_SECONDS + job_runner.REAP_SECONDS < MOST_SECONDS
    assert all(0 < one.expected < one.limit for one in jobs)


@pytest.mark.parametrize("xdist", [True, False])
@pytest.mark.parametrize("missing", ["", "pytest", "hypothesis"])
def test_the_tests_run_in_many_processes_where_they_can(
    xdist: bool, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {"pytest", "hypothesis", *(["xdist"] if xdist else [])} - {missing}
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: name if name in there else None)
    tests = next(one for one in plan() if one.name == "pytest -m gpu")
    assert (" -n 8 --dist loadgroup" in tests.line) == xdist
    assert tests.absent == (f"{missing} not installed" if missing else None)


def test_a_dry_run_shows_the_jobs_that_a_run_begins(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu, "today", lambda: "2026-01-01")
    assert main(["gpu", "--dry-run"]) == 0
    dry = capsys.readouterr().out
    begun: list[Job] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu.record, "slug", lambda device: "DEVICE")

    def note(jobs: list[Job], total: float, folder: Path) -> dict[str, Result]:
        begun.extend(jobs)
        return {one.name: Result(WELL, "") for one in jobs}

    monkeypatch.setattr(job_runner, "run_jobs", note)
    assert main(["gpu"]) == 0
    places = [dry.index(f"{one.name}\n{'':26}{one.line}\n") for one in begun]
    assert places == sorted(places) and len(begun) == 1 + 2 * len(names())
    total, most = job_runner.expected_seconds(begun), job_runner.most_seconds(begun, gpu.TOTAL_SECONDS)
    assert dry.splitlines()[-1] == f"expected: {total:.0f} s in all; at most {most:.0f} s"


@pytest.mark.slow
def test_the_dry_run_of_make() -> None:
    make = shutil.which("make")
    if make is None:
        pytest.skip("make is not installed")
    command = [make, "-s", "--no-print-directory", "gpu", "DRY_RUN=1", f"PYTHON={sys.executable}"]
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        [*command, "RESULTS=elsewhere"],
        cwd=ROOT,
        env=alone,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("expected: ")
    assert f"{ROOT / 'elsewhere'}/" in done.stdout


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
def test_the_exit_status_and_what_is_said(
    ended: dict[str, str], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu.record, "slug", lambda device: "a-gpu")
    monkeypatch.setattr(
        job_runner,
        "run_jobs",
        lambda jobs, total, folder: {one.name: Result(ended.get(one.name, WELL), "") for one in jobs},
    )
    assert main(["gpu"]) == status
    said = capsys.readouterr().err
    for name, state in ended.items():
        assert any(line.startswith(f"{state}: ") and name in line for line in said.splitlines())
    assert "a-gpu-" in said


def test_states_and_outputs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    results = run(
        tmp_path,
        job("import sys; print('out'); print('err', file=sys.stderr)", "good"),
        job("print('bad'); raise SystemExit(3)", "bad"),
        job("raise SystemExit(5)", "nothing", nothing=(5,)),
        job("print('never')", "absent", absent="no such thing"),
    )
    assert {name: result.state for name, result in results.items()} == {
        "good": WELL,
        "bad": WRONG,
        "nothing": NOT_HERE,
        "absent": NOT_HERE,
    }
    printed = capfd.readouterr().out
    assert "---- absent: not here, no such thing\n" in printed and "never" not in printed
    good = printed[printed.index("---- good: well, exit status 0") :].splitlines()
    assert sorted(good[1:3]) == ["err", "out"]
    bad = printed[printed.index("---- bad: wrong, exit status 3") :].splitlines()
    assert bad[1] == "bad"


def test_jobs_of_a_stage_run_at_once_and_the_next_stage_after_them(tmp_path: Path) -> None:
    meet = (
        "import pathlib, time\n"
        "pathlib.Path('{0}').touch()\n"
        "while not pathlib.Path('{1}').exists(): time.sleep(0.01)"
    )
    after = "import pathlib; assert pathlib.Path('a').exists() and pathlib.Path('b').exists()"
    results = run(
        tmp_path,
        job(meet.format("a", "b"), "a"),
        job(meet.format("b", "a"), "b"),
        job(after, "c", stage=2),
    )
    assert [result.state for result in results.values()] == [WELL] * 3


@pytest.fixture
def hours_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """When this file is there, all limits have gone by, and not before."""
    file = tmp_path / "child"

    class Clock:
        time, sleep = time.time, time.sleep

        @staticmethod
        def monotonic() -> float:
            return time.monotonic() + (3 * HANG_SECONDS if file.exists() else 0.0)

    monkeypatch.setattr(job_runner, "time", Clock)
    monkeypatch.setattr(job_runner, "REAP_SECONDS", 4 * HANG_SECONDS)
    return file


@needs_proc
def test_a_job_that_hangs_is_killed_with_its_child(
    hours_pass: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    results = run(tmp_path, job(HANGS, "hangs"), total=100 * HANG_SECONDS)
    assert results["hangs"].state == WRONG and "its limit" in results["hangs"].words
    until(lambda: gone(int(hours_pass.read_text())))
    assert "begun" in capfd.readouterr().out


@needs_proc
def test_a_child_that_a_job_leaves_behind_is_killed(tmp_path: Path) -> None:
    leaves = HANGS.replace("child.wait()", "")
    results = run(tmp_path, job(leaves, "leaves"))
    assert results["leaves"].state == WELL
    until(lambda: gone(int((tmp_path / "child").read_text())))


def test_what_is_after_a_job_that_hangs_is_begun(tmp_path: Path) -> None:
    hangs = "import threading; threading.Event().wait()"
    results = run(
        tmp_path,
        job(hangs, "hangs", limit=MISSED_SECONDS),
        job("print('beside')", "beside"),
        job("print('after')", "after", stage=2),
    )
    assert {name: result.state for name, result in results.items()} == {
        "hangs": WRONG,
        "beside": WELL,
        "after": WELL,
    }


@needs_proc
def test_when_the_time_is_over_nothing_is_begun_and_that_is_said(
    hours_pass: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    later = job("import pathlib; pathlib.Path('later').touch()", "later", stage=2)
    results = run(tmp_path, job(HANGS, "hangs", limit=100 * HANG_SECONDS), later)
    assert results["hangs"].state == WRONG and results["later"].state == NOT_BEGUN
    assert "when the time for all jobs was over" in results["hangs"].words
    assert not (tmp_path / "later").exists()
    assert "---- later: not begun, the time for all jobs was over" in capfd.readouterr().out


def test_a_job_is_told_when_its_tests_have_to_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = time.time()
    tells = job(f"import os; print(os.environ['{job_runner.UNTIL}'], os.environ['GIVEN'])", "tells")
    run(tmp_path, replace(tells, environment={"GIVEN": "too"}))
    told, given = capfd.readouterr().out.splitlines()[1].split()
    ends = HANG_SECONDS - job_runner.LAST_TEST_SECONDS
    assert before + ends - 1.0 <= float(told) <= time.time() + ends + 1.0 and given == "too"


@needs_proc
@pytest.mark.parametrize("number", job_runner.SIGNALS)
def test_who_ends_the_suite_ends_its_jobs(number: signal.Signals, tmp_path: Path) -> None:
    code = (
        "import pathlib, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from bench.harness.job_runner import Job, run_jobs\n"
        f"run_jobs([Job(1, 'hangs', (sys.executable, '-c', {HANGS!r}), 1.0, 1e6)], 1e6, pathlib.Path('.'))\n"
    )
    suite = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path)
    until((tmp_path / "child").exists)
    suite.send_signal(number)
    assert suite.wait(HANG_SECONDS) == 128 + number
    until(lambda: gone(int((tmp_path / "child").read_text())))
