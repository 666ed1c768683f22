"""A pytest plugin for a GPU: results are kept as they come, a hang or a broken context ends its worker alone.

    python -m pytest -m gpu -n 8 -p bench.gpu.pytest_plugin tests/kernels

After a CUDA error that sticks, every later test of the process would fail as well, and a process that waits
for the device never comes back to Python. Such a process ends at once: pytest-xdist counts its test as failed
and starts another worker. Without xdist a broken context ends the run, and says so.

SMOPD_TEST_ROWS: a file for a JSON line a test. SMOPD_TEST_SECONDS: how long a test may take.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from collections.abc import Generator
from contextlib import nullcontext

import pytest

ROWS, SECONDS = "SMOPD_TEST_ROWS", "SMOPD_TEST_SECONDS"
BROKEN_STATUS = 70
MESSAGE_CHARACTERS = 3000

_failed: set[str] = set()
_stderr = 2


def pytest_configure(config: pytest.Config) -> None:
    """Stacks of a hang go where the process's errors went before pytest captured them."""
    global _stderr
    capture = config.pluginmanager.getplugin("capturemanager")
    with nullcontext() if capture is None else capture.global_and_fixture_disabled():
        _stderr = os.dup(2)


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    seconds = float(os.environ.get(SECONDS, "0"))
    if seconds:
        faulthandler.dump_traceback_later(seconds, exit=True, file=_stderr)  # a thread of C: needs no GIL
    try:
        result = yield
        if item.nodeid in _failed and context_is_broken():
            _leave(item)
        return result
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        _failed.add(item.nodeid)
    return report


def context_is_broken() -> bool:
    """Whether the device answers with an error still: an illegal access does, until the process ends."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _leave(item: pytest.Item) -> None:
    if _is_worker(item.config):
        os.write(_stderr, f"{item.nodeid}: the CUDA context is broken, its worker ends\n".encode())
        os._exit(BROKEN_STATUS)
    pytest.exit(f"the CUDA context is broken since {item.nodeid}", BROKEN_STATUS)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """In the process that has the results of all: workers hand theirs on."""
    path = os.environ.get(ROWS)
    if path is None or os.environ.get("PYTEST_XDIST_WORKER") or (report.when != "call" and report.passed):
        return
    row = {
        "test": report.nodeid,
        "when": report.when,
        "outcome": report.outcome,
        "seconds": round(report.duration, 3),
    }
    if not report.passed:
        row["message"] = _message(report)[-MESSAGE_CHARACTERS:]
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def _message(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    return str(report.longrepr)
