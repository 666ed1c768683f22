"""The command line: values, and one error line per mistake with its place, before torch is imported."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from smopd.config.cli import describe, parse, print_section, read_settings
from smopd.config.errors import ANSWERS, schemas
from smopd.config.recipe import Mistakes, load, write_yaml
from smopd.config.schedule import PlannedRun, plan
from smopd.config.settings import Settings
from tests.ranks import python

RECIPE = """\
# A tiny recipe.
name: tiny
model: {factory: "m:model", kwargs: {width: 64}}
data:
  train: {source: "m:prompts"}
  evaluation: {source: "m:held_out"}
rewards:
  - {name: accuracy, function: "m:f", range: [-3, 3]}
  - name: format
    function: m:g
    weight: 2
student:
  learning_rate: 1e-4
warm_start:
  source: {source: "m:demonstrations"}
  steps: 7
runs:
  gdpo: {stage: train}
  format_teacher:
    stage: specialize
    reward_weights: [0.1, 0.9]
    set: {loop: {steps: 30}}
  smopd:
    stage: merge
    set:
      teachers: {models: [{model: format_teacher, reward: format}]}
      merge: {method: published}
      opd:
        kappa: 4
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def mistakes(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    """Return the error lines of an invalid command."""
    with pytest.raises(SystemExit) as stop:
        parse(list(argv))
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    return [line.removeprefix("error: ") for line in err.splitlines()]


def test_settings_go_over_the_recipe(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--stage merge --opd.kappa 32 --rewards.1.weight 3 --output {name}/x --runs.smopd.init gdpo"
    command = parse(["tiny.yaml", *words.split()])
    assert (command.recipe, command.stage, command.dry_run, command.only) == ("tiny.yaml", "merge", False, ())
    settings = command.settings
    assert (settings.opd.kappa, settings.rewards[1].weight, settings.output) == (32, 3.0, "tiny/x")
    assert (settings.runs["smopd"].init, settings.student.learning_rate) == ("gdpo", 1e-4)
    assert settings.resolved("smopd").opd.kappa == 4
    note = "note: runs smopd: their own opd.kappa applies; change it by --runs.NAME.set.opd.kappa\n"
    assert capsys.readouterr().err == note


@pytest.mark.parametrize(
    ("words", "path", "value"),
    [
        (["--opd.tail", "false"], "opd.tail", False),
        (["--loss.dual_clip=3"], "loss.dual_clip", 3.0),
        (["--student.betas", "0.8", "0.9"], "student.betas", (0.8, 0.9)),
        (["--rewards.0.range", "batch"], "rewards.0.range", "batch"),
        (["--description", "Answer: [briefly] # now"], "description", "Answer: [briefly] # now"),
        (["--description=--x"], "description", "--x"),
        (["--runs.gdpo.set.opd.coef", "1e-2"], "runs.gdpo.set.opd.coef", 0.01),
        (["--runs.gdpo.reward_weights", "1", "9"], "runs.gdpo.reward_weights", [1.0, 9.0]),
        (["--log.trackers", "wandb"], "log.trackers", ["wandb"]),
        (["--description", "1:30"], "description", "1:30"),
        (["--model.kwargs.a", "yes"], "model.kwargs.a", "yes"),
        (["--model.kwargs.a", "[1, {a: null}]"], "model.kwargs.a", [1, {"a": None}]),
        (["--model.kwargs.a", "[1"], "model.kwargs.a", "[1"),
        (["--model.kwargs.a", "<<"], "model.kwargs.a", "<<"),
        (["--model.kwargs.a", "[!!int x]"], "model.kwargs.a", "[!!int x]"),
        (["--model.kwargs.a", "9" * 5000], "model.kwargs.a", "9" * 5000),
        (["--runs.format_teacher.reward_weights.1", "9"], "runs.format_teacher.reward_weights", [0.1, 9.0]),
        (["--seed", "1", "--seed", "2"], "seed", 2),
    ],
)
def test_values_on_the_command_line(folder: Path, words: list[str], path: str, value: object) -> None:
    at: Any = parse(["tiny.yaml", *words]).settings
    for key in path.split("."):
        at = at[key] if isinstance(at, dict) else at[int(key)] if isinstance(at, list) else getattr(at, key)
    assert at == value and type(at) is type(value)


BROKEN = """\
nam: tiny
model: {factory: model}
data: {train: {source: "m:prompts"}}
rewards:
  - {name: accuracy, range: [3]}
  - {name: format, function: "m:g", wieght: 2}
loop: {steps: many, kappa: 3}
student:
opd: {kappa: 400}
loss: {clip_low: true}
runs:
  gdpo: {stage: control}
  smopd: {stage: merg}
"""
TYPES = """\
broken.yaml:1: nam: no such setting; did you mean name?
broken.yaml:2: model.factory: got 'model', expected `package.module:function`
broken.yaml:5: rewards.0.function: missing, expected package.module:function
broken.yaml:5: rewards.0.range: got [3], expected [number, number]|batch|null
broken.yaml:6: rewards.1.wieght: no such setting; did you mean rewards.1.weight?
broken.yaml:7: loop.kappa: no such setting; did you mean opd.kappa?
broken.yaml:7: loop.steps: got "many", expected integer >= 0, <= 1e+09
broken.yaml:8: student: got null, expected a section
broken.yaml:9: opd.kappa: got 400, expected integer >= 1, <= 128
broken.yaml:10: loss.clip_low: got true, expected a number
broken.yaml:12: runs.gdpo.stage: is now train
broken.yaml:13: runs.smopd.stage: got "merg", expected specialize|merge|train; did you mean merge?
command line: evaluation.every: got -1, expected integer >= 0
command line: rewards.4.weight: rewards has no entry '4'; there are 2, counted from 0
command line: rewards.²: rewards has no entry '²'; there are 2, counted from 0
command line: seed: no value
top.yaml:3: opd.tial: no such setting; did you mean opd.tail?
"""
CROSSED = """\
name: tiny
model: {path: ../there/none}
data: {train: {source: tiny.jsonl}}
rewards:
  - {name: accuracy, function: "m:f"}
runs:
  first: {stage: merge}
  teacher: {stage: specialize, set: {opd: {kapa: 4}}}
  smopd:
    stage: merge
    set:
      teachers:
        models:
          - {model: techer, reward: accuracy}
          - {model: smopd, reward: accuracy}
"""
RULES = """\
r.yaml:2: model.path: no file '../there/none' (there is no folder '../there')
r.yaml:3: data.train.source: no file 'tiny.jsonl'; did you mean tiny.yaml?
r.yaml:7: runs.first: stage merge needs teachers, and teachers.models is empty
r.yaml:8: runs.teacher.set.opd.kapa: no such setting; did you mean opd.kappa?
r.yaml:14: runs.smopd.set.teachers.models.0.model: 'techer' is not a run of this recipe; did you mean teacher?
r.yaml:15: runs.smopd.set.teachers.models.1.model: 'smopd' must come before the run 'smopd', which uses it
"""


def test_all_mistakes_at_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "broken.yaml").write_text(BROKEN)
    (folder / "top.yaml").write_text("extends: broken.yaml\n\nopd: {tial: true}\n")
    words = ["--evaluation.every", "-1", "--rewards.4.weight", "1", "--rewards.²", "1", "--seed"]
    assert sorted(mistakes(capsys, "top.yaml", *words)) == sorted(TYPES.splitlines())
    (folder / "r.yaml").write_text(CROSSED)
    assert mistakes(capsys, "r.yaml") == RULES.splitlines()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--stge merge", "--stge: no such option; did you mean --stage?"),
        ("--loop.² 1", "loop.²: no such setting; there are "),
        ("--seed.x 3", "seed.x: seed is 5, not a section"),
        ("--opd.product.x 1", f"opd.product: {ANSWERS['opd.product']}"),
        ("--opd.support product", "opd.support: product was removed; use merge.method weights, which did"),
        ("--runs.gdpo.merge.method weights", "runs.gdpo.merge: no such setting; did you mean runs.gdpo.set"),
        ("--only gpdo", "--only: 'gpdo' is not a run; did you mean gdpo?; there are ['gdpo', 'format"),
        ("--only gdpo --stage merge", "--stage merge with --only gdpo: tiny.yaml has no such run"),
        ("--runs.gdpo.init smopd", "runs.gdpo.init: 'smopd' is not an earlier run, expected one of ['base']"),
    ],
)
def test_a_mistake_on_the_command_line(folder: Path, capsys, words: str, line: str) -> None:
    (folder / "tiny.yaml").write_text(RECIPE + "seed: 5\nopd: {kappa: 4}\n")
    (said,) = mistakes(capsys, "tiny.yaml", *words.split())
    assert said.startswith(f"command line: {line}")


BOMB = "a: &a [1, 2, 3, 4, 5, 6, 7, 8, 9]\n"
BOMB += "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefg"))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("opd:\n  kappa: 4\n  tail: true\n  kappa: 8\n", ":4: opd.kappa is given twice, first on line 2"),
        ("name: [tiny\nopd: 3\n", ":2:4: not YAML: while parsing a flow sequence, expected ',' or ']', but"),
        ("- 1\n- 2\n", ": got a list, expected settings as `name: value` lines"),
        ("name: !!python/object:os.system x\n", ":1:7: not YAML: could not determine a constructor for the"),
        (BOMB, ":1: the recipe is too large, expected at most 32 levels and 10,000 values, with aliases"),
        ("extends: 3\n", ":1: extends: got 3, expected a recipe"),
        ("extends: tinny.yaml\n", ":1: extends: no recipe 'tinny.yaml'; did you mean tiny.yaml?"),
        ("extends: r.yaml\n", ":1: extends: r.yaml: extends itself: r.yaml -> r.yaml"),
    ],
)
def test_a_file_that_is_no_recipe(folder: Path, capsys: pytest.CaptureFixture[str], text: str, line: str):
    (folder / "r.yaml").write_text(text)
    (said,) = mistakes(capsys, "r.yaml")
    assert said.startswith(f"r.yaml{line}")


def test_a_folder_is_no_recipe(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (said,) = mistakes(capsys, ".")
    assert said.startswith("no recipe '.'; there are quickstart")


def test_a_mistake_in_a_list_is_in_the_file_that_the_list_is_from(folder: Path, capsys) -> None:
    (folder / "top.yaml").write_text("extends: tiny.yaml\nrewards:\n  - {name: accuracy, range: [-3, 3]}\n")
    line = "top.yaml:3: rewards.0.function: missing, expected package.module:function"
    assert mistakes(capsys, "top.yaml") == [line]


def test_extends_is_relative_to_its_file_and_later_files_win(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "middle.yaml").write_text("extends: ../tiny.yaml\nopd: {kappa: 8, tail: false}\n")
    top = "extends: sub/middle.yaml\nopd: {kappa: 2}\nruns: {more: {stage: train}, gdpo: null}\n"
    (folder / "top.yaml").write_text(top)
    settings = read_settings("top.yaml")
    assert (settings.opd.kappa, settings.opd.tail) == (2, False)
    assert list(settings.runs) == ["format_teacher", "smopd", "more"]


def test_an_override_leaves_an_alias_elsewhere_alone(folder: Path) -> None:
    aliased = 'kwargs: &k {width: 64}}\nscoring: {}\nwarm_start: {source: {source: "m:d", kwargs: *k}}\n'
    recipe = RECIPE.replace("kwargs: {width: 64}}\n", aliased).partition("warm_start:\n")
    (folder / "r.yaml").write_text(recipe[0] + recipe[2].partition("steps: 7\n")[2])
    settings = read_settings("r.yaml", {"model.kwargs.width": ["8"]})
    assert settings.model.kwargs == {"width": 8}
    assert settings.warm_start is not None and settings.warm_start.source.kwargs == {"width": 64}


def test_written_settings_read_back_equal(folder: Path) -> None:
    hostile = ["yes", "1e-6", "null", "2024-01-01", "a: b # c", "ü\u2028\n\tx", "a\x85b", "", "<<", "{x}"]
    kwargs = {text: text for text in hostile} | {"texts": hostile, "tiny": 1e-30, "n": [[1], {}, None]}
    settings = read_settings("tiny.yaml")
    settings = settings.model_copy(update={"model": settings.model.model_copy(update={"kwargs": kwargs})})
    (folder / "config.yaml").write_text(write_yaml(settings), encoding="utf-8")
    assert Settings.model_validate(load("config.yaml").values) == settings
    assert Settings.model_validate(yaml.safe_load(write_yaml(settings))) == settings


def test_the_plan_follows_the_recipe_and_the_finished_runs(folder: Path) -> None:
    settings = read_settings("tiny.yaml")
    done = Path(settings.output) / "gdpo" / "done.json"
    done.parent.mkdir(parents=True)
    done.write_text('{"steps": 100}')
    weights = {"accuracy": 1.0, "format": 2.0}
    base, gdpo, format_teacher, smopd = plan(settings)
    assert base == PlannedRun("base", "warm-start", init="model", weights={}, steps=7, done=False)
    assert gdpo == PlannedRun("gdpo", "train", init="base", weights=weights, steps=100, done=True)
    assert format_teacher.weights == {"accuracy": 0.1, "format": 0.9} and format_teacher.steps == 30
    assert (smopd.stage, smopd.teachers, smopd.merge) == ("merge", ("format_teacher",), None)
    assert [run.name for run in plan(settings, "specialize")] == ["base", "format_teacher"]
    assert [run.name for run in plan(settings, "merge")] == ["smopd"]
    assert [run.name for run in plan(settings, "all", ("smopd",))] == ["base", "smopd"]
    assert plan(settings, "evaluate") == []
    longer = ["tiny.yaml", "--dry-run", "--loop.steps", "120"]
    assert "gdpo" in describe(parse(longer)) and "continues after step 100" in describe(parse(longer))
    shown = describe(parse(["tiny.yaml", "--dry-run", "--only", "smopd"])).splitlines()
    assert len(shown) == 4 and "teachers format_teacher" in shown[2] and "base, smopd" in shown[3]
    evaluated = describe(parse(["tiny.yaml", "--dry-run", "--stage", "evaluate", "--only", "gdpo"]))
    assert evaluated.splitlines()[1:] == ["  evaluate    base, gdpo"]


def test_help_names_every_section_and_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert all(f"\n  {name}: " in text for name in Settings.model_fields) and "--dry-run" in text
    print_section("all")
    text = capsys.readouterr().out
    for path in ("--opd.gate.floor", "--rewards.N.weight", "--runs.NAME.init", "--teachers.models.N.reward"):
        assert path in text
    print_section("opd")
    text = capsys.readouterr().out
    assert "integer >= 1, <= 128  (16)" in text and "lambda at the first step" in text
    with pytest.raises(Mistakes, match="did you mean student"):
        print_section("studnet")


def test_one_rank_speaks_for_a_node(folder: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert mistakes(capsys, "tiny.yaml", "--opd.kapa", "3") == []


@pytest.mark.parametrize("path", sorted(ANSWERS))
def test_a_setting_of_an_earlier_version_is_answered(folder: Path, path: str) -> None:
    given = {path.replace(".N.", ".0."): ["1"]}
    if path.startswith("merge.models"):
        given = {"merge.models": [f"[{{model: format_teacher, {path.rpartition('.')[2]}: 1}}]"]}
    with pytest.raises(Mistakes) as raised:
        read_settings("tiny.yaml", given)
    assert raised.value.lines == [f"command line: {path.replace('.N.', '.0.')}: {ANSWERS[path]}"]
    new = ANSWERS[path].removeprefix("is now ").partition(";")[0]
    if ANSWERS[path].startswith("is now"):
        assert tuple(new.partition(".kwargs.")[0].split(".")) in schemas() or ".engine_kwargs." in new


def test_a_terminal_that_does_not_know_a_character_ends_nothing() -> None:
    done = python("-c", r"import smopd.extra; print('\u2192')", PYTHONIOENCODING="latin-1")
    assert done.stdout == "\\u2192\n", done.stderr
