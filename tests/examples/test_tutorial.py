"""The tutorial runs from top to bottom, with one step per run."""

import pytest

from tests.ranks import ROOT, on_ranks


@pytest.mark.slow
def test_the_tutorial_runs(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="needs matplotlib (the study extra)")
    monkeypatch.setenv("SMOPD_TUTORIAL", "small")
    monkeypatch.setenv("MPLBACKEND", "agg")
    done = on_ranks(1, str(ROOT / "examples/tutorial.py"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "runs/tutorial_weights (" in done.stdout and "fused: " in done.stdout
    assert (tmp_path / "runs/tutorial/report.html").exists()
