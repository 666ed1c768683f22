"""Every block of docs/extending.md runs, and each of its functions is what the run uses."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from smopd.config.cli import read_settings
from smopd.config.recipe import Mistakes
from smopd.config.settings import merged
from smopd.evaluate import main as evaluate
from tests.smopd.recipes import metric_lines, train_here, write_recipe

PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text()
NAMED = {
    "advantage": {"estimator": "my_run:centred"},
    "opd": {"target": "my_run:surest"},
    "student": {"optimizer": "my_run:sgd", "schedule": "my_run:halved"},
    "log": {"trackers": ["my_run:Lines"]},
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the page's modules."""
    for block in blocks("python"):
        if named := re.match(r"# (\w+\.py)\n", block):
            (tmp_path / named[1]).write_text(block)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("my_rewards", "my_run", "my_suite"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def recipe_of(page: dict[str, Any], folder: Path) -> Path:
    teachers = [{"model": str(folder / "teacher"), "reward": reward["name"]} for reward in page["rewards"]]
    own = {"loop": {"steps": 4, "updates_per_step": 1}, "teachers": {"models": teachers}}
    recipe = write_recipe(folder, page | own, drop=("warm_start", "runs"))
    recipe.write_text(recipe.read_text() + "runs: {student: {stage: merge}}\n")
    return recipe


def test_a_run_takes_the_pages_functions(place: Path) -> None:
    from smopd.worlds.models import world_model

    for part in world_model(1):
        part.save_pretrained(place / "teacher")
    rewards, parts = (yaml.safe_load(block) for block in blocks("yaml"))
    assert merged(parts, NAMED) == parts
    done = train_here(recipe_of(rewards | parts, place), "--student.learning_rate", "0.01")
    assert done.returncode == 0, done.stderr[-4000:]
    run = place / "runs/tiny/student"
    lines = [line for line in metric_lines(run) if "grad_norm" in line]
    seen = [json.loads(line) for line in (run / "lines.jsonl").read_text().splitlines()]
    assert (
        [line["step"] for line in seen if "grad_norm" in line] == [1, 2, 3, 4] == [x["step"] for x in lines]
    )
    assert all(0 <= line["reward/brevity/mean"] <= 1 for line in lines)
    assert all(abs(line["advantage/mean"]) < 1e-6 for line in lines), "each group's mean is 0"


@pytest.mark.parametrize(
    "setting", ["advantage.estimator", "opd.target", "student.optimizer", "student.schedule"]
)
def test_a_path_that_leads_nowhere_is_answered_before_training(place: Path, setting: str) -> None:
    done = train_here(write_recipe(place), f"--{setting}", "my_run:nothing")
    assert done.returncode == 1
    assert f"{setting}: 'my_run:nothing': my_run has no function 'nothing'" in done.stderr


def test_a_name_that_is_neither_ours_nor_a_path_is_a_mistake(place: Path) -> None:
    with pytest.raises(Mistakes) as raised:
        read_settings(
            str(write_recipe(place)), {"student.schedule": ["cosin"], "log.trackers": ["[neptune]"]}
        )
    assert sorted(line.partition(": ")[2] for line in raised.value.lines) == [
        'log.trackers.0: got "neptune", expected tensorboard|trackio|wandb|package.module:function',
        'student.schedule: got "cosin", expected constant|linear|cosine|package.module:function; '
        "did you mean cosine?",
    ]


def test_the_suite_is_evaluated(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate(["my_suite:Riddles", "--responses", "ground-truth", "--output", "out"]) == 0
    assert "Riddles" in capsys.readouterr().out
    (place / "said.jsonl").write_text('{"response": "4"}\n{"response": "5"}\n')
    assert evaluate(["my_suite:Riddles", "--responses", "said.jsonl", "--output", "out"]) == 0
    assert "50.0" in capsys.readouterr().out
    assert (
        evaluate(["my_suite:Riddles", "--responses", "ground-truth", "--limit", "1", "--output", "out"]) == 0
    )


def test_a_trainer_of_ones_own() -> None:
    n, width, vocabulary = 6, 8, 32
    weights = torch.rand(2, n, width), torch.rand(2, vocabulary, width)
    names: dict[str, Any] = {
        "rewards_RK": torch.tensor([[0.0, 1.0], [1.0, 0.0], [2.0, 1.0], [1.0, 1.0]]),
        "group_R": torch.tensor([0, 0, 1, 1]),
        "weights_K": torch.tensor([0.5, 0.5]),
        "teachers": [0, 1],
        "hidden_of": lambda teacher: weights[0][teacher],
        "head_of": lambda teacher: weights[1][teacher],
        "response_ids_N": torch.arange(n),
        "response_of_token_N": torch.tensor([0, 0, 1, 2, 2, 3]),
        "old_logp_N": None,
        "mask_N": torch.ones(n),
        "n_tokens_of_all_ranks": n,
        "hidden_ND": torch.rand(n, width, requires_grad=True),
        "head_VD": torch.rand(vocabulary, width, requires_grad=True),
    }
    (block,) = (text for text in blocks("python") if "smopd.ops" in text)
    exec(block, names)
    assert names["loss"].isfinite() and names["hidden_ND"].grad.abs().sum() > 0
