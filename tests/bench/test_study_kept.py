"""What is kept of a finished job is what the page reads, and stands in for its runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from bench.study.__main__ import main, train
from bench.study.finished import Study
from bench.study.jobs import Job
from bench.study.kept import keep, restore
from smopd.config.recipe import write_yaml
from smopd.config.schedule import BASE

ENVIRONMENT = {
    "git": {"commit": "0123456789abcdef", "modified": False},
    "cpus": 2,
    "packages": {"torch": "2"},
}


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Finished, every run with numbers of its own."""
    job = Job("conflict", "moderate", 3, tmp_path / "runs", "cpu")
    job.folder.mkdir(parents=True)
    (job.folder / "config.yaml").write_text(write_yaml(job.settings))
    (job.folder / "environment.json").write_text(json.dumps(ENVIRONMENT | {"command": ["a"]}))
    job.seconds.write_text("90.0\n")
    for i, name in enumerate((BASE, *job.settings.runs)):
        run = job.folder / name
        run.mkdir()
        (run / "done.json").write_text("{}")
        (run / "evaluation.json").write_text(json.dumps({"sampled/sum": i / 7, "greedy/sum": None}))
        lines = [{"step": step, "reward/brevity/zero_variance_groups": step / 4} for step in (1, 2)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (job.folder / "start" / "merge.json").write_text(json.dumps({"chosen": "plain sum", "rows": []}))
    return job


def numbers(job: Job) -> list[object]:
    done = Study({("conflict", "moderate"): [job.folder]}).finished("conflict", "moderate")
    silent = done.mean("gdpo", "reward/brevity/zero_variance_groups")
    return [done.settings.runs, done.settings.seed, done.table(["sampled/sum", "greedy/sum"]), silent]


def test_a_restored_job_has_the_numbers_of_its_runs(job: Job, tmp_path: Path) -> None:
    before = numbers(job)
    assert "0.375" in str(before[-1])
    path = keep(job, tmp_path / "results")
    assert path.name == "conflict_moderate_seed_3.json" and path.stat().st_size < 20_000
    kept = json.loads(path.read_text())
    assert kept["runs"]["start"]["chosen"] == "plain sum" and "command" not in kept["environment"]
    assert str(tmp_path) not in path.read_text()
    other = Job("conflict", "moderate", 3, tmp_path / "elsewhere", "cpu")
    restore([other, Job("conflict", "base", 3, tmp_path / "elsewhere", "cpu")], tmp_path / "results")
    assert numbers(other) == before
    assert other.complete and other.changes == {} and other.spent() == 90.0
    assert [folder.name for folder in (tmp_path / "elsewhere" / "conflict").iterdir()] == ["moderate"]


def test_runs_that_are_there_are_not_replaced(job: Job, tmp_path: Path) -> None:
    path = keep(job, tmp_path / "results")
    path.write_text(path.read_text().replace("90.0", "17.0"))
    restore([job], tmp_path / "results")
    assert job.spent() == 90.0


def test_a_job_without_results_is_not_kept(job: Job, tmp_path: Path) -> None:
    (job.folder / "gdpo" / "evaluation.json").unlink()
    with pytest.raises(FileNotFoundError, match="gdpo has no evaluation"):
        keep(job, tmp_path / "results")
    assert not (tmp_path / "results").exists()


def test_a_kept_job_is_not_run_again_and_a_new_run_of_its_recipe_begins_anew(
    job: Job, tmp_path: Path, monkeypatch
) -> None:
    results = tmp_path / "docs" / "study" / "results"
    path = keep(job, results)
    shutil.rmtree(job.folder)
    trained = []

    def run(job: Job) -> bool:
        trained.append(job.folder.exists())
        return False

    monkeypatch.setattr("bench.study.jobs._run", run)
    monkeypatch.setattr("bench.study.__main__.write_page", lambda options, done: done.sort(key=str))
    command = [
        "--only",
        "conflict",
        "--seeds",
        "3",
        "--output",
        str(job.output),
        "--pages",
        str(tmp_path / "docs"),
    ]
    assert main(command) == 1
    assert trained == [False] and job.complete  # the base variant alone
    (job.folder / "gdpo" / "done.json").unlink()
    assert main(command) == 1
    assert trained == [False, False, False] and path.exists()


def test_a_job_is_kept_as_it_ends(job: Job, tmp_path: Path, monkeypatch) -> None:
    job.seconds.unlink()
    monkeypatch.setattr("bench.study.jobs._share_base", lambda job: 0)
    monkeypatch.setattr("bench.study.jobs._train", lambda job, command: 0)

    class Where:
        at_once = 1
        results = tmp_path / "results"

    (job.folder / "gdpo" / "done.json").unlink()
    assert train([job], Where()) == []  # type: ignore[arg-type]
    assert [path.name for path in Where.results.iterdir()] == ["conflict_moderate_seed_3.json"]
