"""`pytest bench`, and the study's recipes and stored results."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.harness import record
from bench.study.experiments import EXPERIMENTS
from bench.study.jobs import Job
from bench.study.pages import draw, filled, stored
from bench.study.results import Steps
from tests.patience import HANG_SECONDS

SPOILED = """
import bench.advantages as bench
right = bench.gdpo_advantages
bench.gdpo_advantages = lambda *given, **options: right(*given, **options) + 1e-3
"""


@pytest.mark.slow
def test_pytest_bench(repository_root: Path, tmp_path: Path) -> None:
    """A wrong result of ours fails without a time; rows have machine and versions."""
    pytest.importorskip("pytest_benchmark", reason="needs pytest-benchmark")
    (tmp_path / "spoiled.py").write_text(SPOILED)
    rows = tmp_path / "deep" / "rows.jsonl"
    options = ("--smopd-cases", "quick", "--smopd-seconds", "0.01", "--smopd-output", str(rows))
    command = [sys.executable, "-m", "pytest", "bench", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        [*command, "-p", "spoiled", "-k", "advantages and not compile", *options],
        cwd=repository_root,
        env=outer | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{repository_root}"},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 1, done.stdout[-3000:]
    found = record.rows_of(rows)
    assert {"eager", "reference"} == {row["provider"] for row in found}
    for row in found:
        assert row["device"] and row["torch"] == torch.__version__ and row["python"] and "commit" in row
        if row["kind"] == "ours":
            assert row["refused"].startswith("advantages is off by") and "ms" not in row
        else:
            assert 0 < row["p20_ms"] <= row["ms"] <= row["p80_ms"] and row["of_ceiling"] > 0
    assert done.stdout.count("| advantages N") == len(found)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_smopd_train_accepts_every_job_of_the_study(experiment: str, tmp_path: Path) -> None:
    for variant in EXPERIMENTS[experiment].variants:
        settings = Job(experiment, variant, 3, tmp_path, tmp_path).settings
        assert settings.seed == 3 and EXPERIMENTS[experiment].baseline in settings.runs


def test_the_pages_show_the_stored_results(repository_root: Path, tmp_path: Path) -> None:
    results = repository_root / "docs/study/results"
    for page in ("README.md", "docs/study.md", "docs/quickstart.md", "docs/merging.md"):
        text = (repository_root / page).read_text()
        assert "<!-- table " in text and filled(text, results) == text, f"{page}: run bench.study --pages"
    (first, *_) = stored(results, "equal_cost", "base")
    assert first.steps["smopd"] == Steps(25, 105, 65) and first.steps["smopd_paper"] == Steps(50, 130, 90)
    pytest.importorskip("matplotlib", reason="needs matplotlib (the study extra)")
    draw(tmp_path, results)
    assert (tmp_path / "equal_cost.png").stat().st_size > 10_000
