"""SMOPD_TEST_SECONDS cuts the fixture or the test that is under way, and nothing of pytest's own."""

from __future__ import annotations

import os
import subprocess
import sys
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


def test_time_limit_skips_and_breaks_nothing(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((Path(__file__).parent / "conftest.py").read_text())
    (tmp_path / "test_limit.py").write_text(TESTS)
    (tmp_path / "alarms.py").write_text(ALARMS)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "alarms", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "SMOPD_TEST_SECONDS": "36000", "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "2 passed, 3 skipped" in run.stdout
    assert "3  the time was up" in run.stdout
