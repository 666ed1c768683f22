"""tests/gpu_plugin.py: a broken CUDA context ends the process that has it, and names the test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.gpu_plugin import BROKEN_STATUS
from tests.patience import HANG_SECONDS

TESTS = """
import sys
import types

broken = []


def synchronize():
    if broken:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


cuda = types.SimpleNamespace(is_initialized=lambda: True, synchronize=synchronize)
sys.modules["torch"] = types.SimpleNamespace(cuda=cuda)


def test_before():
    pass


def test_that_breaks_the_context():
    broken.append(1)


def test_after():
    pass
"""


def test_a_broken_context_ends_the_run(repository_root: Path, tmp_path: Path) -> None:
    (tmp_path / "test_inner.py").write_text(TESTS)
    options = (
        "-v",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-p",
        "tests.gpu_plugin",
        "--rootdir",
        tmp_path,
    )
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *map(str, options), str(tmp_path)],
        env=outer | {"PYTHONPATH": str(repository_root)},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == BROKEN_STATUS, done.stdout
    assert "since test_inner.py::test_that_breaks_the_context" in done.stdout
    assert "test_before PASSED" in done.stdout and "test_after" not in done.stdout
