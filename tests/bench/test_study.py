"""The study: recipes resolve, statistics equal numpy's, kept results are read and not made again."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bench.study.conflict import brevity_reward, coverage_reward
from bench.study.experiments import EXPERIMENTS
from bench.study.jobs import Job, jobs, run
from bench.study.results import T_975, Steps, best, difference, read, spread
from bench.study.show import curves, levels, table
from smopd.config.recipe import write_yaml
from smopd.config.schedule import BASE
from smopd.worlds.toy_world import prompts

VARIANTS = [(name, variant) for name, one in EXPERIMENTS.items() for variant in one.variants]
STORED = sorted((Path(__file__).parents[2] / "docs/study/results").glob("*.json"))


@pytest.mark.parametrize(("experiment", "variant"), VARIANTS, ids=["-".join(each) for each in VARIANTS])
def test_smopd_train_accepts_every_job(experiment: str, variant: str, tmp_path: Path) -> None:
    job = Job(experiment, variant, 3, tmp_path / "runs", tmp_path / "results")
    settings = job.settings
    assert settings.seed == 3 and Path(settings.output) == job.folder
    assert set(EXPERIMENTS[experiment].baselines) <= set(settings.runs)


@pytest.mark.parametrize("n", [2, 3, 5, 10])
def test_statistics_equal_numpy(n: int) -> None:
    these, those = np.random.default_rng(n).normal(size=(2, n))
    apart = these - those
    mean, deviation, count = spread([*these, None])
    assert (mean, deviation, count) == (pytest.approx(these.mean()), pytest.approx(these.std(ddof=1)), n)
    found = difference([*these, 1.0], [*those, None])
    assert found.mean == pytest.approx(apart.mean())
    assert found.reach == pytest.approx(t_975(n - 1) * apart.std(ddof=1) / np.sqrt(n), rel=1e-3)
    assert (found.ahead, found.equal, found.n) == ((apart > 0).sum(), 0, n)


def t_975(degrees: int) -> float:
    """By quadrature of Student's density: with t = sqrt(degrees) tan(x) it is cos(x)^(degrees - 1) in x."""
    x = np.linspace(-np.pi / 2, np.pi / 2, 2_000_001)
    below = np.cumsum(np.cos(x) ** (degrees - 1))
    at = np.searchsorted(below / below[-1], 0.975)
    return float(np.sqrt(degrees) * np.tan(x[at]))


def test_statistics_without_enough_seeds() -> None:
    assert spread([None, float("nan")]) is None and difference([1.0], [None]) is None
    assert str(spread([2.0])) == "2.000"
    assert str(difference([2.0], [1.5])) == "+0.500 (1 of 1)"
    assert str(difference([2.0, 1.0], [2.0, 1.0])) == "+0.000 ± 0.000 (0 of 2, 2 equal)"
    assert len(T_975) == 9 and str(difference([1.0] * 11, [0.0] * 11)) == "+1.000 (11 of 11)"
    assert best([1.0, None, 3.0], [2.0, 2.0, 1.0]) == [2.0, None, 3.0]


def test_stored_results_are_readable(tmp_path: Path) -> None:
    assert len(STORED) >= 20
    results = [read(path) for path in STORED if path.stem.startswith("merging_snips")]
    assert [result.seed for result in results] == [0, 1, 2, 3, 4]
    assert results[0].steps["guarded"] == Steps(50, 210, 130)
    assert results[0].steps["smopd_paper"] == Steps(80, 240, 160)
    (row,) = [line for line in table("merging_snips", results).splitlines() if "as we would run it" in line]
    assert "| 210 | 130 | 2.209 ± 0.018 |" in row and "| 3.093 ± 0.057 | +0.016 ± 0.032 (4 of 5) |" in row
    pytest.importorskip("matplotlib", reason="needs matplotlib (the study extra)")
    levels(tmp_path / "levels.png", results)
    assert (tmp_path / "levels.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Has the training command write what it leaves behind; the jobs that it ran for."""
    ran: list[str] = []

    def train(command: list[str], **options: object) -> SimpleNamespace:
        folder = Path(command[command.index("--output") + 1])
        job = Job("conflict", "moderate", 3, folder.parent, folder.parent)
        ran.append(folder.name)
        (folder / "config.yaml").write_text(write_yaml(job.settings))
        (folder / "environment.json").write_text(json.dumps({"git": {"commit": "0123"}, "command": ["a"]}))
        for i, name in enumerate((BASE, *job.settings.runs)):
            (folder / name).mkdir(exist_ok=True)
            (folder / name / "evaluation.json").write_text(json.dumps({"sampled/sum": i / 7}))
            lines = [{"step": step, "reward/brevity/mean": step / 4, "loss": 1.0} for step in (1, 2)]
            (folder / name / "metrics.jsonl").write_text("".join(json.dumps(at) + "\n" for at in lines))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", train)
    return ran


def test_a_finished_job_is_kept_and_not_run_again(trained: list[str], tmp_path: Path) -> None:
    results = tmp_path / "results"
    wanted = [job for job in jobs(["conflict"], [3], tmp_path / "runs", results) if job.variant != "base"]
    assert run(wanted, 1) == [] and trained == ["conflict_moderate_seed_3"]
    assert run(wanted, 1) == [] and len(trained) == 1
    kept = read(wanted[0].kept)
    assert kept.value("gdpo", "sampled/sum") == 1 / 7 and kept.environment["git"] == {"commit": "0123"}
    assert kept.runs["gdpo"]["curves"] == {"reward/brevity/mean": [0.25, 0.5]}
    assert kept.steps["guarded"] == Steps(40, 160, 100)
    assert str(tmp_path) not in wanted[0].kept.read_text()
    pytest.importorskip("matplotlib", reason="needs matplotlib (the study extra)")
    curves(tmp_path / "curves.png", [kept])
    assert (tmp_path / "curves.png").exists()
    wanted[0].kept.write_text(
        wanted[0].kept.read_text().replace('"gd2po": {\n   "evaluation"', '"old": {\n   "evaluation"')
    )
    assert run(wanted, 1) == [] and len(trained) == 2, "a recipe with a new run is due again"


def test_a_job_that_fails_is_reported_and_leaves_no_result(monkeypatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: SimpleNamespace(returncode=2))
    wanted = jobs(["curves"], [0], tmp_path / "runs", tmp_path / "results")
    assert run(wanted, 2) == wanted and "failed with 2, see" in capsys.readouterr().out
    assert not wanted[0].kept.exists()


def test_the_conflicting_rewards() -> None:
    row = prompts(1, seed=5)[0]
    call = json.loads(row["ground_truth"].split("<tool_call>\n")[1].split("\n</tool_call>")[0])
    values = [str(value) for value in call["parameters"].values()]
    answers = ["", " ".join(values), values[0]]
    covered = coverage_reward([""] * 3, answers, [row["ground_truth"]] * 3)
    assert covered == [0.0, 1.0, pytest.approx(1 / len(values))]
    shortest = '<tool_call>{"name": "a"}</tool_call>'
    answers = ["", "x" * 80, shortest, shortest.ljust(80), shortest.ljust(500), '<tool_call>{"</tool_call>']
    said = brevity_reward([""] * 6, answers, longest=160)
    assert said == [0.0, 0.0, 1.0 - len(shortest) / 160, 0.5, 0.0, 0.0], "silence and no call earn nothing"


def test_snips_are_calls_that_score_full_marks(data_set: Callable[[str], Path]) -> None:
    from bench.study import snips
    from smopd.rewards.rlla import accuracy_reward, format_reward

    folder = str(data_set("snips"))
    rows = snips.prompts(folder, 100, 0, "validate")
    truths, asked = ([row[key] for row in rows] for key in ("ground_truth", "prompt"))
    assert accuracy_reward(asked, truths, ground_truth=truths) == [3.0] * 100
    assert format_reward(asked, truths, ground_truth=truths) == [1.0] * 100
    rows = snips.demonstrations(folder, 2000, 0, 0.05)
    answers, truths, asked = ([row[key] for row in rows] for key in ("completion", "ground_truth", "prompt"))
    assert 0.03 < sum(format_reward(asked, answers, ground_truth=truths)) / 2000 < 0.07
    _, tokenizer = snips.model(0, folder=folder)
    for answer in answers[:50]:
        assert tokenizer.decode(tokenizer(answer, add_special_tokens=False).input_ids) == answer
