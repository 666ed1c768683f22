"""The study's recipes and stored results."""

from pathlib import Path

import pytest

from bench.study.experiments import EXPERIMENTS
from bench.study.jobs import Job
from bench.study.pages import draw, filled, stored
from bench.study.results import Steps
from tests.ranks import ROOT


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_smopd_train_accepts_every_job_of_the_study(experiment: str, tmp_path: Path) -> None:
    for reward in ("accuracy", "format"):
        (tmp_path / f"wide_teachers_base_seed_3/{reward}_teacher/export").mkdir(parents=True)
    for variant in EXPERIMENTS[experiment].variants:
        settings = Job(experiment, variant, 3, tmp_path, tmp_path).settings
        assert settings.seed == 3 and EXPERIMENTS[experiment].baseline in settings.runs


def test_the_pages_show_the_stored_results(tmp_path: Path) -> None:
    results = ROOT / "docs/study/results"
    for page in ("README.md", "docs/study.md", "docs/merging.md"):
        text = (ROOT / page).read_text()
        assert "<!-- table " in text and filled(text, results) == text, f"{page}: run bench.study --pages"
    (first, *_) = stored(results, "equal_cost", "base")
    # two teachers of 40 steps; the guard's eleven candidates have as many rollouts as eleven steps
    assert first.steps["smopd"] == Steps(25, 80 + 11 + 25, 65)
    assert first.steps["smopd_paper"] == Steps(50, 130, 90)
    assert first.steps["batch_balanced_128"] == Steps(65, 130, 65), "with twice the prompts"
    pytest.importorskip("matplotlib", reason="needs matplotlib (the study extra)")
    draw(tmp_path, results)
    assert all((tmp_path / f"{name}.png").stat().st_size > 10_000 for name in ("equal_cost", "rarity"))
