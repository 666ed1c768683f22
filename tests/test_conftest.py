"""SMOPD_TEST_UNTIL cuts the fixture or the test that is under way, and nothing of pytest's own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

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


def run(folder: Path, seconds: float, *options: str) -> str:
    (folder / "conftest.py").write_text((Path(__file__).parent / "conftest.py").read_text())
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
