"""examples/trl_two_teachers.py as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("trl", reason="needs trl (the trl extra)")

ROOT = Path(__file__).resolve().parents[2]


def example(*arguments: str) -> list[str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "examples/trl_two_teachers.py", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize("what", ["distillation", "grpo"])
def test_it_trains(what: str) -> None:
    steps = [line for line in example(what, "--steps", "2") if line.startswith("step ")]
    assert len(steps) == 2
    assert all(float(line.rsplit(" ", 1)[1]) > 0 for line in steps)
