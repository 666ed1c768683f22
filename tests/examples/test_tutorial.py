"""The tutorial runs from top to bottom, with one step per run."""

import runpy
import subprocess
import sys

import pytest

from tests.smopd.recipes import ROOT, train_here


@pytest.mark.slow
def test_the_tutorial_runs(tmp_path, monkeypatch, capsys):
    """Its commands run in this process."""
    monkeypatch.setenv("SMOPD_TUTORIAL", "small")
    monkeypatch.setenv("MPLBACKEND", "agg")
    pytest.importorskip("matplotlib", reason="needs matplotlib (the study extra)")

    plain = subprocess.run

    def run(words, **options):
        if words[:3] != [sys.executable, "-m", "smopd.train"]:
            return plain(words, **options)
        done = train_here(*words[3:], cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-4000:]

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "examples/tutorial.py"))
    said = capsys.readouterr().out
    assert "runs/tutorial_weights (" in said and "fused: " in said
    assert (tmp_path / "runs/tutorial/report.html").exists()
