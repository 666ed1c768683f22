"""The tutorial runs from top to bottom, with one step per run."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.ranks import ROOT, environment


@pytest.mark.slow
def test_the_tutorial_runs(tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib (the study extra)")
    own = {"SMOPD_TUTORIAL": "small", "MPLBACKEND": "agg"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/tutorial.py")],
        cwd=tmp_path,
        env=environment() | own,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "runs/tutorial_weights (" in done.stdout and "fused: " in done.stdout
    assert (tmp_path / "runs/tutorial/report.html").exists()
