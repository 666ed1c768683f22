"""The study: its recipes resolve, its jobs are told apart, its arithmetic is the paper's."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.study import theory
from bench.study.conflict import brevity_reward, coverage_reward
from bench.study.experiments import EXPERIMENTS, SIZES
from bench.study.jobs import Job, _share_base, jobs, run
from smopd.config.cli import parse
from smopd.config.recipe import write_yaml
from smopd.run.folder import environment
from smopd.worlds.toy_world import prompts

VARIANTS = [(name, variant) for name, one in EXPERIMENTS.items() for variant in one.variants]


@pytest.mark.parametrize(("experiment", "variant"), VARIANTS, ids=["-".join(each) for each in VARIANTS])
@pytest.mark.parametrize("size", SIZES)
def test_every_run_of_the_study_is_one_that_the_command_takes(
    experiment: str, variant: str, size: str, tmp_path: Path
) -> None:
    command = Job(experiment, variant, 3, tmp_path, size).command()
    assert command[1:3] == ["-m", "smopd.train"]
    settings = parse(command[3:]).settings
    assert settings.seed == 3 and settings.processes == 1
    assert "0.18%" not in settings.description, "the quickstart's description is of its own numbers"
    root = tmp_path if size == "cpu" else tmp_path / size
    assert Path(settings.output) == root / experiment / variant / "seed_3"


def test_variants_change_what_their_names_say(tmp_path: Path) -> None:
    def settings(experiment: str, variant: str):
        return parse(Job(experiment, variant, 0, tmp_path, "cpu").command()[3:]).settings

    kwargs = settings("density", "rate_0.005").warm_start.source.kwargs
    assert kwargs["format_rate"] == 0.005 and kwargs["n"] == 32000
    runs = settings("profiles", "share_0.95").runs
    assert runs["format_teacher"].reward_weights == [0.05, 0.95]
    assert runs["accuracy_teacher"].reward_weights == [0.95, 0.05]
    ablations = settings("ablations", "base")
    assert ablations.resolved("kappa_64").opd.kappa == 64
    assert ablations.resolved("merged_tail").opd.tail and ablations.resolved("kappa_64").opd.tail is False
    assert ablations.resolved("smopd").opd.schedule == "linear"
    assert ablations.resolved("no_anchor").loss.anchor_coef == 0


def test_jobs_go_seed_by_seed(tmp_path: Path) -> None:
    ordered = jobs(["curves", "density"], (0, 1), tmp_path, "cpu")
    assert [job.seed for job in ordered] == [0] * 6 + [1] * 6


def test_jobs_that_begin_alike_share_their_warm_start(tmp_path: Path, monkeypatch) -> None:
    first, second = (Job(name, "base", 0, tmp_path, "cpu") for name in ("curves", "conflict"))
    assert first.base == second.base
    assert Job("profiles", "share_0.6", 0, tmp_path, "cpu").base == first.base
    others = [("curves", "base", 1), ("density", "rate_0.05", 0), ("snips", "base", 0)]
    assert first.base not in [Job(*other, tmp_path, "cpu").base for other in others]

    warmed = []

    def train(job: Job, command: list[str]) -> int:
        if command[-2:] == ["--stage", "warm-start"]:
            warmed.append(job)
            (job.folder / "base" / "export").mkdir(parents=True)
            (job.folder / "base" / "evaluation.json").write_text("{}")
        return 0

    monkeypatch.setattr("bench.study.jobs._train", train)
    assert run([first, second], at_once=2) == [] and first.finished and second.finished
    assert len(warmed) == 1
    (other,) = {first, second} - set(warmed)
    assert [path.name for path in (other.folder / "base").iterdir()] == ["export"]


def test_an_interrupted_copy_of_the_warm_start_is_made_again(tmp_path: Path, monkeypatch) -> None:
    job = Job("conflict", "base", 0, tmp_path, "cpu")
    (job.base / "export").mkdir(parents=True)
    (job.base / "done.json").write_text("{}")
    whole = shutil.copytree

    def interrupted(source: Path, to: Path, **options: object) -> None:
        (to / "torn").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "copytree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _share_base(job)
    monkeypatch.setattr(shutil, "copytree", whole)
    assert _share_base(job) == 0
    assert sorted(path.name for path in (job.folder / "base").iterdir()) == ["done.json", "export"]
    assert [path.name for path in job.folder.iterdir()] == ["base"]


def test_a_jobs_time_is_without_its_wait_for_another(tmp_path: Path, monkeypatch) -> None:
    clock = [0.0]

    class Held:
        def __enter__(self) -> None:
            clock[0] += 100.0

        def __exit__(self, *error: object) -> None:
            clock[0] += 7.0

    monkeypatch.setattr("bench.study.jobs._BASES", defaultdict(Held))
    monkeypatch.setattr("bench.study.jobs.time", SimpleNamespace(monotonic=lambda: clock[0], time=time.time))
    monkeypatch.setattr("bench.study.jobs._share_base", lambda job: 0)
    monkeypatch.setattr("bench.study.jobs._train", lambda job, command: 0)
    job = Job("conflict", "base", 0, tmp_path, "cpu")
    assert run([job], at_once=1) == []
    assert float(job.seconds.read_text()) == 7.0


def test_the_profiles_and_the_ablations_differ_in_no_more_than_the_profile(tmp_path: Path) -> None:
    """So that the ablations' lambda 0 is the GDPO of the moderate student."""
    moderate, ablated = (
        Job(*names, 0, tmp_path, "cpu") for names in (("profiles", "share_0.7"), ("ablations", "base"))
    )
    assert moderate.base == ablated.base
    student = moderate.settings.resolved("smopd_paper")
    gdpo = ablated.settings.resolved("lambda_0")
    assert gdpo.opd.coef == 0 and gdpo.loss.anchor_coef == 1 and gdpo.advantage.estimator == "gdpo"
    for part in ("loop", "loss", "rollout", "student", "advantage", "rewards", "evaluation"):
        assert getattr(student, part) == getattr(gdpo, part), part


def test_a_job_of_other_settings_is_told_apart(tmp_path: Path) -> None:
    job = Job("density", "rate_0.05", 0, tmp_path, "cpu")
    assert job.changes == {}
    job.folder.mkdir(parents=True)
    now = write_yaml(job.settings)
    (job.folder / "config.yaml").write_text(now)
    assert job.changes == {}
    (job.folder / "config.yaml").write_text(now.replace("format_rate: 0.05", "format_rate: 0.04"))
    assert job.changes == {"warm_start.source.kwargs.format_rate": (0.04, 0.05)}
    kept = [line for line in now.splitlines() if "watch:" not in line]
    (job.folder / "config.yaml").write_text("\n".join(kept))  # of a version that knew fewer settings
    assert len(kept) < len(now.splitlines()) and job.changes == {}


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_that_of_our_own_checkout(tmp_path: Path, monkeypatch) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    (tmp_path / "folder.py").write_text("1")
    monkeypatch.setattr("smopd.run.folder.__file__", str(tmp_path / "folder.py"))
    git("init")
    assert environment()["git"] is None  # a checkout, but not of this file
    git("add", ".")
    git("commit", "-m", "first")
    assert environment()["git"] == {"commit": git("rev-parse", "HEAD"), "modified": False}
    (tmp_path / "folder.py").write_text("2")
    assert environment()["git"]["modified"]


def test_a_finished_job_whose_recipe_has_a_new_run_is_due_again(tmp_path: Path, monkeypatch) -> None:
    job = Job("conflict", "base", 0, tmp_path, "cpu")
    for name in job.settings.runs:
        (job.folder / name).mkdir(parents=True)
        (job.folder / name / "done.json").write_text("{}")
    job.seconds.write_text("30.0\n")
    assert job.complete
    (job.folder / "gd2po" / "done.json").unlink()
    assert job.finished and not job.complete
    monkeypatch.setattr("bench.study.jobs._share_base", lambda job: 0)
    monkeypatch.setattr("bench.study.jobs._train", lambda job, command: 0)
    assert run([job], at_once=1) == []
    assert 30.0 <= float(job.seconds.read_text()) < 40.0


def test_what_an_interrupted_attempt_took_is_counted(tmp_path: Path, monkeypatch) -> None:
    job = Job("conflict", "base", 0, tmp_path, "cpu")
    monkeypatch.setattr("bench.study.jobs._share_base", lambda job: 0)
    at = {"time": 1000.0}

    def train(job: Job, command: object) -> int:
        log = job.folder / "study.log"
        log.write_text("a step")
        os.utime(log, (at["time"] + 70.0,) * 2)
        if at["time"] < 3000.0:
            raise KeyboardInterrupt
        return 0

    monkeypatch.setattr("bench.study.jobs._train", train)
    monkeypatch.setattr("bench.study.jobs.time.time", lambda: at["time"])
    for at["time"] in (1000.0, 2000.0):
        with pytest.raises(KeyboardInterrupt):
            run([job], at_once=1)
        assert not job.finished
    at["time"] = 3000.0
    assert run([job], at_once=1) == []
    assert 140.0 <= float(job.seconds.read_text()) < 150.0
    assert not job.begun.exists()


def test_figure_1a_is_the_papers() -> None:
    before, after = theory.figure_1a((0.1, 0.9))
    assert before.mean(0).tolist() == pytest.approx([0.0526, -0.0950, -0.0175, 0.0599], abs=6e-5)
    assert after.mean(0).tolist() == pytest.approx([0.1950, -0.3524, -0.0650, 0.2224], abs=6e-5)


def test_the_expected_signal() -> None:
    assert theory.mixed_groups(0.5, 1) == 0
    assert theory.mixed_groups(0.003, 8) == pytest.approx(0.0237, abs=1e-4)
    assert theory.mixed_groups_given(1, 128, 8) == pytest.approx(1 / 16)
    assert theory.mixed_groups_given(0, 128, 8) == theory.mixed_groups_given(128, 128, 8) == 0
    expected = sum(
        math.comb(12, k) * 0.3**k * 0.7 ** (12 - k) * theory.mixed_groups_given(k, 12, 4) for k in range(13)
    )
    assert expected == pytest.approx(theory.mixed_groups(0.3, 4))


def test_the_conflicting_rewards() -> None:
    row = prompts(1, seed=5)[0]
    call = json.loads(row["ground_truth"].split("<tool_call>\n")[1].split("\n</tool_call>")[0])
    values = [str(value) for value in call["parameters"].values()]
    answers = ["", " ".join(values), values[0]]
    covered = coverage_reward([""] * 3, answers, [row["ground_truth"]] * 3)
    assert covered[:2] == [0.0, 1.0] and covered[2] == pytest.approx(1 / len(values))
    shortest = '<tool_call>{"name": "a"}</tool_call>'
    answers = ["", "x" * 80, shortest, shortest.ljust(80), shortest.ljust(500), '<tool_call>{"</tool_call>']
    said = brevity_reward([""] * 6, answers, longest=160)
    assert said == [0.0, 0.0, 1.0 - len(shortest) / 160, 0.5, 0.0, 0.0], "silence and no call earn nothing"


def test_an_unknown_experiment_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from bench.study.__main__ import main

    assert main(["--only", "curve", "--output", str(tmp_path)]) == 2
    assert "--only curve: expected one of curves, density" in capsys.readouterr().err


def test_snips_are_calls_that_score_full_marks(data_set: Callable[[str], Path]) -> None:
    from bench.study import snips
    from smopd.rewards.rlla import accuracy_reward, format_reward

    folder = str(data_set("snips"))
    rows = snips.prompts(folder, 100, 0, "validate")
    truths = [row["ground_truth"] for row in rows]
    asked = [row["prompt"] for row in rows]
    assert accuracy_reward(asked, truths, ground_truth=truths) == [3.0] * 100
    assert format_reward(asked, truths, ground_truth=truths) == [1.0] * 100
    demonstrated = snips.demonstrations(folder, 2000, 0, 0.05)
    exact = format_reward(
        [row["prompt"] for row in demonstrated],
        [row["completion"] for row in demonstrated],
        ground_truth=[row["ground_truth"] for row in demonstrated],
    )
    assert 0.03 < sum(exact) / 2000 < 0.07
    with pytest.raises(ValueError, match="split is 'test', expected one of train, validate"):
        snips.prompts(folder, 1, 0, "test")


def test_the_snips_model_reads_and_writes_its_words(data_set: Callable[[str], Path]) -> None:
    from bench.study import snips

    folder = str(data_set("snips"))
    _, tokenizer = snips.model(0, folder=folder)
    for row in snips.demonstrations(folder, 50, 1, 0.5):
        ids = tokenizer(row["completion"], add_special_tokens=False).input_ids
        assert tokenizer.decode(ids) == row["completion"]
        words = tokenizer.convert_ids_to_tokens(tokenizer(row["prompt"], add_special_tokens=False).input_ids)
        assert [word.strip() for word in words] == row["prompt"].split()
