"""How the jobs of `make gpu` are held to their limits, and what is kept of each."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bench.gpu import jobs
from bench.gpu.jobs import NOT_BEGUN, NOT_HERE, WELL, WRONG, Job, Log, Result
from tests.patience import HANG_SECONDS, MISSED_SECONDS

ROOT = Path(__file__).resolve().parents[2]
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


def run(folder: Path, *todo: Job, total: float = HANG_SECONDS) -> dict[str, Result]:
    return jobs.run_jobs(todo, total, folder, Log(folder / "log"))


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
    printed, log = capfd.readouterr().out, (tmp_path / "log").read_text()
    assert "---- absent: not here, no such thing\n" in printed and "never" not in printed + log
    assert "[good] out\n" in log and "[good] err\n" in log and "---- good: well, exit status 0" in log
    bad = printed[printed.index("---- bad: wrong, exit status 3") :].splitlines()
    assert bad[1].strip() == "bad" and " out" not in printed


def test_what_a_job_prints_is_kept_as_it_comes(tmp_path: Path) -> None:
    waits = (
        "import pathlib, time\n"
        "print('first')\n"
        "while '[waits] first' not in pathlib.Path('log').read_text(): time.sleep(0.01)"
    )
    assert run(tmp_path, job(waits, "waits"))["waits"].state == WELL


def test_after_each_stage_the_caller_may_look(tmp_path: Path) -> None:
    leaves = "import pathlib; pathlib.Path('{0}').touch()"
    todo = [job(leaves.format(name), name, stage) for stage, name in enumerate("ab")]
    seen: list[set[str]] = []
    jobs.run_jobs(todo, HANG_SECONDS, tmp_path, Log(), lambda: seen.append(set(os.listdir(tmp_path))))
    assert seen == [{"a"}, {"a", "b"}]


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

    monkeypatch.setattr(jobs, "time", Clock)
    monkeypatch.setattr(jobs, "REAP_SECONDS", 4 * HANG_SECONDS)
    return file


@needs_proc
def test_a_job_that_hangs_is_killed_with_its_child(
    hours_pass: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    results = run(tmp_path, job(HANGS, "hangs"), total=100 * HANG_SECONDS)
    assert results["hangs"].state == WRONG and "its limit" in results["hangs"].words
    until(lambda: gone(int(hours_pass.read_text())))
    assert "     begun\n" in capfd.readouterr().out


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


def test_a_job_is_told_when_its_tests_have_to_end(tmp_path: Path) -> None:
    before = time.time()
    tells = job(f"import os; print(os.environ['{jobs.UNTIL}'], os.environ['GIVEN'])", "tells")
    run(tmp_path, replace(tells, environment={"GIVEN": "too"}))
    told, given = (tmp_path / "log").read_text().partition("[tells] ")[2].splitlines()[0].split()
    ends = HANG_SECONDS - jobs.LAST_TEST_SECONDS
    assert before + ends - 1.0 <= float(told) <= time.time() + ends + 1.0 and given == "too"


@needs_proc
@pytest.mark.parametrize("number", jobs.SIGNALS)
def test_who_ends_the_suite_ends_its_jobs(number: signal.Signals, tmp_path: Path) -> None:
    code = (
        "import pathlib, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from bench.gpu.jobs import Job, Log, run_jobs\n"
        f"hangs = Job(1, 'hangs', (sys.executable, '-c', {HANGS!r}), 1.0, 1e6)\n"
        "run_jobs([hangs], 1e6, pathlib.Path('.'), Log())\n"
    )
    suite = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path)
    until((tmp_path / "child").exists)
    suite.send_signal(number)
    assert suite.wait(HANG_SECONDS) == 128 + number
    until(lambda: gone(int((tmp_path / "child").read_text())))
