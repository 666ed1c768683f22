"""On a GPU a hang or a broken CUDA context costs one test; results are kept as they come."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu import pytest_plugin
from tests.patience import HANG_SECONDS

ROOT = Path(__file__).resolve().parents[2]


def _outside() -> dict[str, str]:
    """The environment without what pytest-xdist tells its workers, which the inner run is none of."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}


TESTS = """
import ctypes
import sys
import types

import pytest

broken = []


def synchronize():
    if broken:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.fixture(autouse=True)
def cuda(monkeypatch):
    cuda = types.SimpleNamespace(is_initialized=lambda: True, synchronize=synchronize)
    sys.modules["torch"] = types.SimpleNamespace(cuda=cuda)


@pytest.mark.parametrize("number", range(3))
def test_before(number):
    pass


def test_that_breaks_the_context():
    broken.append(1)
    synchronize()


def test_that_is_wrong():
    assert not broken
    raise AssertionError("wrong")


def test_that_hangs():
    ctypes.PyDLL(None).sleep(1000)  # with the interpreter's lock, as a driver's call that never returns may


@pytest.mark.parametrize("number", range(3))
def test_after(number):
    synchronize()
"""


def run(folder: Path, *options: str, seconds: str = "3") -> tuple[str, dict[str, str]]:
    """What pytest prints, and the outcomes in the rows that it leaves."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_cuda.py").write_text(TESTS)
    rows = folder / "rows.jsonl"
    given = {pytest_plugin.ROWS: str(rows), pytest_plugin.SECONDS: seconds, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", pytest_plugin.__name__, "-p", "no:cacheprovider", *options],
        cwd=folder,
        env={**_outside(), **given},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    return done.stdout + done.stderr, {row["test"].partition("::")[2]: row["outcome"] for row in found}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("xdist") is None, reason="pytest-xdist is not installed")
def test_a_broken_context_and_a_hang_cost_their_own_test(tmp_path: Path) -> None:
    printed, outcomes = run(tmp_path, "-n", "1", "--max-worker-restart", "9")
    wrong = {"test_that_breaks_the_context", "test_that_is_wrong", "test_that_hangs"}
    assert {name for name, outcome in outcomes.items() if outcome == "failed"} == wrong, printed
    assert sum(outcome == "passed" for outcome in outcomes.values()) == 6
    assert "the CUDA context is broken, its worker ends" in printed
    assert "test_cuda.py" in printed and "Timeout (0:00:03)" in printed  # where it hung


def test_without_workers_a_broken_context_ends_the_run_and_says_so(tmp_path: Path) -> None:
    printed, outcomes = run(tmp_path, seconds="0")
    assert "the CUDA context is broken since test_cuda.py::test_that_breaks_the_context" in printed
    assert set(outcomes) == {
        *(f"test_before[{number}]" for number in range(3)), "test_that_breaks_the_context"
    }  # fmt: skip
