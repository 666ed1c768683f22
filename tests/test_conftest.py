"""SMOPD_TEST_UNTIL cuts the fixture or test that is under way, nothing of pytest's own; -m gpu; the order."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import FIRST

TESTS = """
import os
import signal

import pytest


def alarm():
    os.kill(os.getpid(), signal.SIGALRM)


@pytest.fixture(scope="module")
def cut_fixture():
    alarm()


def test_whole():
    pass


def test_cut():
    alarm()
    assert False


def test_whole_again():
    pass


def test_cut_in_its_fixture(cut_fixture):
    pass


def test_cut_in_a_fixture_it_asks_for(request):
    request.getfixturevalue("cut_fixture")
"""
ALARMS = """
import os
import signal

import pytest


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup():
    os.kill(os.getpid(), signal.SIGALRM)
    return (yield)


pytest_runtest_call = pytest_runtest_teardown = pytest_runtest_setup


class Lingering:
    # Python has given up its handlers when it calls this.
    def __del__(self, kill=os.kill, process=os.getpid(), alarm=signal.SIGALRM):
        kill(process, alarm)


signal.lingering = Lingering()
"""
TRITON_TESTS = """
import pytest


def test_anywhere():
    pass


@pytest.mark.gpu
def test_large():
    pass
"""


def run(folder: Path, seconds: float, *options: str) -> str:
    (folder / "conftest.py").write_text((Path(__file__).parent / "conftest.py").read_text())
    (folder / "pytest.ini").write_text("[pytest]\n")  # whatever lies in the folders above
    (folder / "test_limit.py").write_text(TESTS)
    (folder / "alarms.py").write_text(ALARMS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, str(folder)],
        cwd=folder,
        env={**os.environ, "SMOPD_TEST_UNTIL": str(time.time() + seconds), "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_alarm_skips_and_breaks_nothing(tmp_path: Path) -> None:
    printed = run(tmp_path, 36000, "-p", "alarms")
    assert "2 passed, 3 skipped" in printed
    assert "3  the time was up" in printed


def test_when_the_time_is_up_nothing_begins(tmp_path: Path) -> None:
    assert "5  the time was up" in run(tmp_path, -1)


def test_the_longest_files_come_first(repository_root: Path, tmp_path: Path) -> None:
    assert all((repository_root / "tests" / file).is_file() for file in FIRST)
    last, first = FIRST[-1], FIRST[0]
    for file in (last, first):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("def test_long():\n    pass\n")
    printed = run(tmp_path, 36000, "-v")
    places = [printed.index(f"{file}::test_") for file in (first, last, "test_limit.py")]
    assert places == sorted(places)


@pytest.mark.parametrize("device", [True, False], ids=["gpu", "no-gpu"])
def test_triton_tests_are_of_the_gpu_where_there_is_one(device: bool, tmp_path: Path) -> None:
    fake = (
        f"import sys\n\ndef pytest_sessionstart():\n    sys.modules['conftest'].has_gpu = lambda: {device}\n"
    )
    (tmp_path / "device.py").write_text(fake)
    (tmp_path / "test_triton_one.py").write_text(TRITON_TESTS)
    printed = run(tmp_path, 36000, "-p", "device", "-m", "gpu", "-v")
    assert ("test_anywhere PASSED" in printed) == device
    assert ("test_large PASSED" in printed) == device
    assert "test_whole" not in printed
    if device:
        assert printed.index("test_large PASSED") < printed.index("test_anywhere PASSED")
