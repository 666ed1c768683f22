"""`init: {merge: ...}` in a recipe: what its mistakes are answered with, and what the plan says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from smopd.config.cli import read_settings
from smopd.config.recipe import Mistakes
from smopd.config.schedule import plan
from tests.smopd.recipes import write_recipe

MODELS = [{"model": "accuracy_teacher"}, {"model": "format_teacher"}]


def settings(folder: Path, merge: dict[str, Any], **given: list[str]) -> Any:
    runs = {"student": {"stage": "control", "init": {"merge": {"models": MODELS, **merge}}}}
    return read_settings(str(write_recipe(folder, {"runs": runs})), given)


@pytest.mark.parametrize(
    ("merge", "said"),
    [
        ({"methd": "ties"}, "methd: no such setting; did you mean runs.student.init.merge.method?"),
        ({"method": "tie"}, 'method: got "tie", expected sum|ties|ram; did you mean ties?'),
        ({"models": [{"model": "base", "keep": [0.1, 2]}]}, "models.0.keep.1: got 2, expected at most 1"),
        (
            {"models": [{"model": "base", "keep": [0.1, 1]}]},
            "models.0.keep: got [0.1, 1.0], expected one witho",
        ),
        (
            {"models": [{"model": "base", "leave_out": "("}]},
            "models.0.leave_out.0: got '(', expected a regular",
        ),
        ({"models": [MODELS[0], MODELS[0]]}, "models: must differ, got ['accuracy_teacher', 'accuracy_teac"),
        (
            {"models": [{**MODELS[0], "reward": "style"}]},
            "models.0.reward: 'style' is none of ['accuracy', '",
        ),
        (
            {"models": [{**MODELS[0], "may_lose": 0.1}]},
            "models.0.may_lose: needs the guard, expected both or",
        ),
        ({"guard": {"prompts": 0}}, "guard.prompts: got 0, expected at least 1"),
        (
            {"models": [{"model": "format_teache"}]},
            "models.0.model: 'format_teache' is no run of this recipe; ",
        ),
        (
            {"models": [{"model": "student"}]},
            "models.0.model: 'student' does not come before the run 'student",
        ),
        ({"base": "/nowhere/base"}, "base: no file '/nowhere/base'"),
    ],
)
def test_mistakes_name_their_setting(tmp_path: Path, merge: dict[str, Any], said: str) -> None:
    with pytest.raises(Mistakes) as raised:
        settings(tmp_path, merge)
    assert len(raised.value.lines) == 1
    assert f"runs.student.init.merge.{said}" in raised.value.lines[0]


def test_a_number_is_a_list_of_one_and_the_command_line_goes_over_it(tmp_path: Path) -> None:
    models = [{"model": "accuracy_teacher", "keep": 0.5}]
    path = "runs.student.init.merge.models.0.scale"
    init = settings(tmp_path, {"models": models}, **{path: ["0.7"]}).runs["student"].init
    assert init.merge.models[0].keep == [0.5] and init.merge.models[0].scale == [0.7]


def test_the_plan_names_what_is_merged(tmp_path: Path) -> None:
    models = [{**MODELS[0], "keep": [1, 0.1], "leave_out": ["", "mlp"]}, MODELS[1]]
    run = plan(settings(tmp_path, {"models": models, "guard": {}}))[-1]
    assert str(run.init) == "base and the changes of accuracy_teacher, format_teacher, the best of 4"
    assert run.starts == ("base", "accuracy_teacher", "format_teacher")
