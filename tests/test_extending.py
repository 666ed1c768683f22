"""A run uses the functions of docs/extending.md."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from smopd.config.settings import merged
from smopd.evaluate import main as evaluate
from tests.smopd.recipes import json_lines, metric_lines, save_world, train_here, write_recipe

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
    """A folder with the modules of the page."""
    for block in blocks("python"):
        if named := re.match(r"# (\w+\.py)\n", block):
            (tmp_path / named[1]).write_text(block)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("my_rewards", "my_environment", "my_run", "my_suite"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def recipe_of(page: dict[str, Any], folder: Path) -> Path:
    teachers = [{"model": str(folder / "teacher"), "reward": reward["name"]} for reward in page["rewards"]]
    own = {"loop": {"steps": 4, "updates_per_step": 1}, "teachers": {"models": teachers}}
    own |= {"runs": {"student": {"stage": "merge"}}}
    return write_recipe(folder, page | own, drop=("warm_start", "runs"))


def test_a_run_takes_the_pages_functions(place: Path) -> None:
    save_world(place / "teacher", 1)
    rewards, _, environment, parts = (yaml.safe_load(block) for block in blocks("yaml"))
    assert merged(parts, NAMED) == parts
    page = rewards | environment | parts
    done = train_here(recipe_of(page, place), "--student.learning_rate", "0.01")
    assert done.returncode == 0, done.stderr[-4000:]
    run = place / "runs/tiny/student"
    lines = [line for line in metric_lines(run) if "grad_norm" in line]
    seen = json_lines(run / "lines.jsonl")
    steps = [[line["step"] for line in each] for each in ([x for x in seen if "grad_norm" in x], lines)]
    assert steps == [[1, 2, 3, 4]] * 2
    assert all(0 <= line["reward/brevity/mean"] <= 1 for line in lines)
    assert all(line["conversation/turns"] >= 1 for line in lines)
    from my_environment import Calculator

    calculator = Calculator()
    answers = [calculator.answer(state, {"content": "a" * 1002}) for state in 3 * [calculator.begin({})]]
    assert answers == [[{"role": "user", "content": "2"}]] * 2 + [None]
    assert all(abs(line["advantage/mean"]) < 1e-6 for line in lines), "each group's mean is 0"


def test_a_path_that_leads_nowhere_is_answered_before_training(place: Path) -> None:
    for setting in ("advantage.estimator", "opd.target", "student.optimizer", "student.schedule"):
        done = train_here(write_recipe(place), f"--{setting}", "my_run:nothing")
        assert done.returncode == 1
        assert f"{setting}: 'my_run:nothing': my_run has no function 'nothing'" in done.stderr


def test_the_suite_is_evaluated(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate(["my_suite:Riddles", "--responses", "ground-truth", "--output", "out"]) == 0
    assert "Riddles" in capsys.readouterr().out
    (place / "said.jsonl").write_text('{"response": "4"}\n{"response": "5"}\n')
    assert evaluate(["my_suite:Riddles", "--responses", "said.jsonl", "--output", "out"]) == 0
    assert "50.0" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        evaluate(["os:getcwd", "--responses", "ground-truth", "--output", "out"])
    assert "os:getcwd returned '/" in capsys.readouterr().err
