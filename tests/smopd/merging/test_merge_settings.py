"""`merge` in a recipe: what its mistakes are answered with, and what the plan says."""

from pathlib import Path
from typing import Any

import pytest

from smopd.config.cli import read_settings
from smopd.config.recipe import Mistakes
from smopd.config.schedule import plan
from tests.smopd.recipes import write_recipe

MODELS = [{"model": "accuracy_teacher"}, {"model": "format_teacher"}]


def settings(folder: Path, merge: dict[str, Any], **given: list[str]) -> Any:
    own = {"method": "weights", "guard": None, "models": MODELS, **merge}
    return read_settings(str(write_recipe(folder, {"merge": own})), given)


def one(**changes: Any) -> dict[str, Any]:
    return {"models": [{**MODELS[0], **changes}]}


@pytest.mark.parametrize(
    ("merge", "said"),
    [
        ({"rule": "ties"}, "rule: was removed: leave it out; changes are added"),
        (one(keep=[0.1, 1]), "models.0.keep: got [0.1, 1.0], expected one value without a guard"),
        (one(exclude="("), "models.0.exclude.0: got '(', expected a regular expression"),
        (one(reward="style"), "models.0.reward: no reward 'style', expected one of ['accuracy', "),
        (one(max_regression=0.1), "models.0.max_regression: needs merge.guard"),
        (one(model="format_teache"), "models.0.model: 'format_teache' is not a run of this recipe"),
        (one(model="student"), "models.0.model: 'student' must come before the run 'student'"),
        ({"models": [MODELS[0]] * 2}, "models: got ['accuracy_teacher', 'accuracy_teacher'], expected diff"),
    ],
)
def test_mistakes_name_their_setting(tmp_path: Path, merge: dict[str, Any], said: str) -> None:
    with pytest.raises(Mistakes) as raised:
        settings(tmp_path, merge)
    assert len(raised.value.lines) == 1
    assert f"merge.{said}" in raised.value.lines[0]


def test_weights_of_teachers_at_urls_cannot_be_merged(tmp_path: Path) -> None:
    models = [{"model": f"http://{name}:1", "reward": name} for name in ("accuracy", "format")]
    with pytest.raises(Mistakes, match=r"merge\.method: weights needs the teachers' weights"):
        settings(tmp_path, {"models": []}, **{"teachers.models": [str(models)]})


def test_the_plan_names_what_is_merged(tmp_path: Path) -> None:
    models = [{**MODELS[0], "keep": [1, 0.1]}, MODELS[1]]
    run = plan(settings(tmp_path, {"models": models, "guard": {}}, **{"merge.models.0.exclude": ["mlp"]}))[-1]
    assert run.start == "base and the changes of accuracy_teacher, format_teacher, the best of 2"
    assert run.starts == ("base", "accuracy_teacher", "format_teacher") and run.teachers == ()
    assert run.merge is not None and run.merge.models[0].exclude == ["mlp"], "one value is a list of one"


def test_a_merge_of_nothing_but_its_teachers_is_the_guarded_merge_of_their_weights(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, drop=("merge", "opd"))
    run = plan(read_settings(str(recipe)))[-1]
    assert run.merge is not None and run.merge.guard is not None and run.teachers == ()
    for each, name in zip(run.merge.models, ("accuracy", "format"), strict=True):
        assert (each.model, each.reward) == (f"{name}_teacher", name)
        assert (each.keep, each.exclude) == ([1, 0.5, 0.2, 0.05], ["", "self_attn"])
    plain = plan(read_settings(str(recipe), {"merge.guard": ["null"]}))[-1]
    assert plain.merge is not None and plain.merge.choices() == 1
