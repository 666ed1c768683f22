"""The command line: what it understands, and that every mistake is answered with its place, before torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from smopd.config.cli import describe, parse, print_help, read_settings
from smopd.config.errors import settings_paths
from smopd.config.recipe import Mistakes, load, parse_value, write_yaml
from smopd.config.renamed import REMOVED, RENAMED
from smopd.config.schedule import PlannedRun, output_directory, plan
from smopd.config.settings import Settings

ROOT = Path(__file__).resolve().parents[3]
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
    """The lines on stderr of a command that is refused."""
    with pytest.raises(SystemExit) as stop:
        parse(list(argv))
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    return [line.removeprefix("error: ") for line in err.splitlines()]


def edited(folder: Path, old: str, new: str) -> str:
    assert RECIPE.count(old) == 1
    (folder / "edited.yaml").write_text(RECIPE.replace(old, new))
    return "edited.yaml"


def test_settings_go_over_the_recipe(folder: Path) -> None:
    words = "tiny.yaml --stage merge --opd.kappa 32 --rewards.1.weight 3 --output out --runs.smopd.init gdpo"
    command = parse(words.split())
    assert (command.recipe, command.stage, command.dry_run, command.only) == ("tiny.yaml", "merge", False, ())
    settings = command.settings
    assert (settings.opd.kappa, settings.rewards[1].weight, settings.output) == (32, 3.0, "out")
    assert settings.runs["smopd"].init == "gdpo"
    assert settings.student.learning_rate == 1e-4
    assert settings.resolved("smopd").opd.kappa == 4


@pytest.mark.parametrize(
    ("words", "path", "value"),
    [
        (["--opd.tail", "false"], "opd.tail", False),
        (["--opd.tail"], "opd.tail", True),
        (["--loss.dual_clip=3"], "loss.dual_clip", 3.0),
        (["--loss.dual-clip", "null"], "loss.dual_clip", None),
        (["--student.betas", "0.8", "0.9"], "student.betas", (0.8, 0.9)),
        (["--student.betas", "[0.8, 0.9]"], "student.betas", (0.8, 0.9)),
        (["--rewards.0.range", "-1", "1"], "rewards.0.range", (-1.0, 1.0)),
        (["--rewards.0.range", "batch"], "rewards.0.range", "batch"),
        (["--data.system", "Answer: [briefly] # now"], "data.system", "Answer: [briefly] # now"),
        (["--data.system", "1e3"], "data.system", "1e3"),
        (["--data.system", "null"], "data.system", None),
        (["--data.system=--x"], "data.system", "--x"),
        (["--model.kwargs.depth", "2"], "model.kwargs.depth", 2),
        (["--model.kwargs.width", "0.5"], "model.kwargs.width", 0.5),
        (["--runs.gdpo.set.opd.coef", "1e-2"], "runs.gdpo.set.opd.coef", 0.01),
        (["--runs.gdpo.reward_weights", "[1, 9]"], "runs.gdpo.reward_weights", [1.0, 9.0]),
        (["--runs.gdpo.reward_weights", "1,9"], "runs.gdpo.reward_weights", [1.0, 9.0]),
        (["--log.trackers", "tensorboard,trackio"], "log.trackers", ["tensorboard", "trackio"]),
        (["--log.trackers", "wandb"], "log.trackers", ["wandb"]),
        (["--advantage.estimator", "m:f"], "advantage.estimator", "m:f"),
        (["--runs.format_teacher.reward_weights.1", "9"], "runs.format_teacher.reward_weights", [0.1, 9.0]),
        (["--seed", "1", "--seed", "2"], "seed", 2),
        (["--warm-start.learning-rate", "1e-6"], "warm_start.learning_rate", 1e-6),
    ],
)
def test_values_on_the_command_line(folder: Path, words: list[str], path: str, value: object) -> None:
    at: Any = parse(["tiny.yaml", *words]).settings
    for key in path.split("."):
        at = at[key] if isinstance(at, dict) else at[int(key)] if isinstance(at, list) else getattr(at, key)
    assert at == value and type(at) is type(value)


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("kappa: 4", "kapa: 4", "29: runs.smopd.set.opd.kapa: no such setting; did you mean opd.kappa?"),
        ("kappa: 4", "kappa: 400", "29: runs.smopd.set.opd.kappa: got 400, expected at most 128"),
        ("weight: 2", "wieght: 2", "11: rewards.1.wieght: no such setting; did you mean rewards.1.weight?"),
        ("weight: 2", "weight: heavy", '11: rewards.1.weight: got "heavy", expected number'),
        ("weight: 2", "weight: true", "11: rewards.1.weight: got true, expected a number"),
        (
            "function: m:g",
            "function: g",
            "10: rewards.1.function: got 'g', expected `package.module:function`",
        ),
        ("    function: m:g\n", "", "9: rewards.1.function: missing, expected text"),
        ("range: [-3, 3]", "range: [3]", "8: rewards.0.range: got [3], expected [number, number]|batch|null"),
        (
            "range: [-3, 3]",
            "range: [3, -3]",
            "8: rewards.0.range: got [3.0, -3.0], expected [lo, hi] with lo < hi",
        ),
        (
            "  learning_rate: 1e-4",
            "  kappa: 3",
            "13: student.kappa: no such setting; did you mean opd.kappa?",
        ),
        ("  learning_rate: 1e-4", "", "12: student: got null, expected a section"),
        ("  learning_rate: 1e-4", "  betas: [0.9]", "13: student.betas.1: missing, expected number"),
        (
            "stage: merge",
            "stage: merg",
            '24: runs.smopd.stage: got "merg", expected specialize|merge|train; did you mean merge?',
        ),
        (
            "reward_weights: [0.1, 0.9]",
            "reward_weights: [1]",
            "21: runs.format_teacher.reward_weights: got 1 weights,"
            " expected one for each of the rewards ['accuracy', 'format']",
        ),
        (
            "model: format_teacher",
            "model: format_techer",
            "26: runs.smopd.set.teachers.models.0.model: 'format_techer'"
            " is no run of this recipe; did you mean format_teacher?",
        ),
        (
            "model: format_teacher",
            "model: ./teacher",
            "26: runs.smopd.set.teachers.models.0.model: no file './teacher'",
        ),
        (
            "reward: format}",
            "reward: fromat}",
            "26: runs.smopd.set.teachers.models.0.reward: 'fromat' is none of ['accuracy', 'format']",
        ),
        (
            'train: {source: "m:prompts"}',
            "train: {source: data.jsonl}",
            "5: data.train.source: no file 'data.jsonl'",
        ),
        (
            '{factory: "m:model", kwargs: {width: 64}}',
            "{path: ../there/none}",
            "3: model.path: no file '../there/none' (there is no folder '../there')",
        ),
    ],
)
def test_a_mistake_in_the_recipe_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, line: str
) -> None:
    found = mistakes(capsys, edited(folder, old, new))
    assert [text.partition(":")[2] for text in found] == [line]
    assert found[0].startswith("edited.yaml:")


def test_all_mistakes_at_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = edited(folder, "weight: 2", "weight: x")
    words = "--opd.kappa 500 --loop.stepps 3 --rewards.4.weight 1 --student.learning_rate 0 --seed"
    found = mistakes(capsys, recipe, *words.split())
    assert sorted(found) == [
        "command line: loop.stepps: no such setting; did you mean loop.steps?",
        "command line: opd.kappa: got 500, expected at most 128",
        "command line: rewards.4.weight: rewards has no entry '4'; the recipe has 2 entries, counted from 0",
        "command line: seed: no value, expected integer",
        "command line: student.learning_rate: got 0, expected more than 0",
        'edited.yaml:11: rewards.1.weight: got "x", expected number',
    ]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--opd.kapa 3", "command line: opd.kapa: no such setting; did you mean opd.kappa?"),
        ("--stge merge", "command line: --stge: no such option; did you mean --stage?"),
        ("--sed 3", "command line: --sed: no such option; did you mean --seed?"),
        ("--seed.x 3", "command line: seed.x: seed is 5, not a section"),
        (
            "--only gpdo",
            "command line: --only: 'gpdo' is no run; did you mean gdpo?; there are"
            " ['gdpo', 'format_teacher', 'smopd']",
        ),
        (
            "--only gdpo --stage merge",
            "command line: --stage merge with --only gdpo: tiny.yaml has nothing to do there",
        ),
        (
            "--runs.gdpo.init smopd",
            "command line: runs.gdpo.init: 'smopd' is no earlier run, expected one of ['base']",
        ),
    ],
)
def test_a_mistake_on_the_command_line(
    folder: Path, capsys: pytest.CaptureFixture[str], words: str, line: str
) -> None:
    (folder / "tiny.yaml").write_text(RECIPE + "seed: 5\n")
    assert mistakes(capsys, "tiny.yaml", *words.split()) == [line]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "name: tiny\nopd:\n  kappa: 4\n  tail: true\n  kappa: 8\n",
            "r.yaml:5: opd.kappa is given twice, first in line 3",
        ),
        (
            "name: [tiny\nopd: 3\n",
            "r.yaml:2:4: not YAML: while parsing a flow sequence, expected ',' or ']', but got ':'",
        ),
        (
            "name: tiny\n\topd: 3\n",
            "r.yaml:2:1: not YAML: while scanning for the next token, found character '\\t'"
            " that cannot start any token",
        ),
        ("- 1\n- 2\n", "r.yaml: got a list, expected settings, `name: value` a line"),
        (
            "name: !!python/object:os.system x\n",
            "r.yaml:1:7: not YAML: could not determine a constructor for the tag"
            " 'tag:yaml.org,2002:python/object:os.system'",
        ),
        ("extends: 3\n", "r.yaml:1: extends: got 3, expected a recipe"),
        ("extends: tinny.yaml\n", "r.yaml:1: extends: no recipe file 'tinny.yaml'; did you mean tiny.yaml?"),
        ("extends: r.yaml\n", "r.yaml:1: extends: r.yaml: extends itself: r.yaml -> r.yaml"),
    ],
)
def test_a_file_that_is_no_recipe(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str, line: str
) -> None:
    (folder / "r.yaml").write_text(text)
    assert mistakes(capsys, "r.yaml") == [line]


def test_hostile_yaml_is_an_answer_and_no_crash(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in (
        b"\xff\xfe\x00",
        b"name: \x00",
        b"a: &a [*a]",
        b"[" * 100,
        b"? [a]\n: b\n",
        b"--- 1\n--- 2\n",
        b"[" * 100_000,
        b"a: !!int ''\n",
        b"a: !!bool maybe\n",
        b"extends: ~nobody-of-this-name/r.yaml\n",
        b"extends: " + b"a" * 5000 + b".yaml\n",
    ):
        (folder / "r.yaml").write_bytes(text)
        assert mistakes(capsys, "r.yaml"), text[:80]


def test_aliases_are_no_bomb(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ten lines that stand for a billion values."""
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)]
    (folder / "r.yaml").write_text("\n".join(lines))
    assert mistakes(capsys, "r.yaml") == ["r.yaml: has more than 10000 values, those of its aliases counted"]


@pytest.mark.parametrize("value", ["[!!bool maybe]", "[!!int x]", "9" * 5000, "[" * 100_000])
def test_a_value_that_is_no_yaml_is_text(value: str) -> None:
    assert parse_value(value) == value


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("quikstart", "no recipe 'quikstart'; did you mean quickstart?"),
        ("tny.yaml", "no recipe file 'tny.yaml'; did you mean tiny.yaml?"),
        ("none/x.yaml", "no recipe file 'none/x.yaml'"),
    ],
)
def test_a_recipe_that_is_not_there(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, line: str
) -> None:
    (found,) = mistakes(capsys, name)
    assert found.startswith(line)


def test_extends_is_relative_to_its_file_and_later_files_win(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "middle.yaml").write_text("extends: ../tiny.yaml\nopd: {kappa: 8, tail: false}\n")
    (folder / "top.yaml").write_text(
        "extends: sub/middle.yaml\nopd: {kappa: 2}\nruns: {more: {stage: train}}\n"
    )
    settings = read_settings("top.yaml")
    assert (settings.opd.kappa, settings.opd.tail) == (2, False)
    assert list(settings.runs) == ["gdpo", "format_teacher", "smopd", "more"]


def test_a_mistake_in_what_is_extended_names_that_file(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edited(folder, "weight: 2", "weight: x")
    (folder / "top.yaml").write_text("extends: edited.yaml\n\nopd: {kapa: 2}\n")
    assert mistakes(capsys, "top.yaml") == [
        'edited.yaml:11: rewards.1.weight: got "x", expected number',
        "top.yaml:3: opd.kapa: no such setting; did you mean opd.kappa?",
    ]


def test_written_settings_read_back_equal(folder: Path) -> None:
    hostile = [
        "yes",
        "1e-6",
        "null",
        "2024-01-01",
        "0x1f",
        "a: b # c",
        "ü\u2028\n\tx",
        "",
        " ",
        "<<",
        "1:30",
        "{x}",
    ]
    kwargs = {
        "texts": hostile,
        **{text: text for text in hostile},
        "tiny": 1e-30,
        "none": None,
        "nested": [[1], {}],
    }
    settings = read_settings("tiny.yaml")
    settings = settings.model_copy(update={"model": settings.model.model_copy(update={"kwargs": kwargs})})
    (folder / "config.yaml").write_text(write_yaml(settings), encoding="utf-8")
    assert Settings.model_validate(load("config.yaml").values) == settings
    assert Settings.model_validate(yaml.safe_load(write_yaml(settings))) == settings


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("-3", -3),
        ("007", 7.0),
        (".5", 0.5),
        ("yes", "yes"),
        ("true", True),
        ("~", None),
        ("", None),
        ("a: b", "a: b"),
        ("[1, {a: null}]", [1, {"a": None}]),
        ("[1", "[1"),
        ("'3'", "3"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("<<", "<<"),
        ("*x", "*x"),
    ],
)
def test_values_are_yaml_1_2(text: str, value: object) -> None:
    assert parse_value(text) == value and type(parse_value(text)) is type(value)


def test_the_plan_follows_the_recipe_and_the_finished_runs(folder: Path) -> None:
    settings = read_settings("tiny.yaml")
    done = output_directory(settings) / "gdpo" / "done.json"
    done.parent.mkdir(parents=True)
    done.write_text("{}")
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


def test_dry_run_is_settings_and_plan(folder: Path) -> None:
    text = describe(parse(["tiny.yaml", "--dry-run", "--only", "smopd"]))
    settings = parse(["tiny.yaml"]).settings
    assert Settings.model_validate(yaml.safe_load(text)) == settings
    assert "teachers format_teacher" in text and "runs/tiny" in text and "# plan" in text
    assert "base, smopd" in text.splitlines()[-1]


def test_a_merge_needs_earlier_teachers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = edited(folder, "gdpo: {stage: train}", "gdpo: {stage: merge}")
    (line,) = mistakes(capsys, recipe)
    assert line == "edited.yaml:18: runs.gdpo: stage merge needs teachers, and teachers.models is empty"
    recipe = edited(folder, "model: format_teacher", "model: smopd")
    (line,) = mistakes(capsys, recipe)
    assert line.endswith("'smopd' does not come before the run 'smopd' that needs it")


def test_help_fits_and_names_every_section(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as stop:
        parse(["--help"])
    assert stop.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 75 and max(map(len, lines)) <= 100
    assert all(any(line.strip().startswith(name) for line in lines) for name in Settings.model_fields)


def test_help_of_a_section_has_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    print_help("x", "all")
    text = capsys.readouterr().out
    for path in ("--opd.gate.floor", "--rewards.N.weight", "--runs.NAME.init", "--teachers.models.N.reward"):
        assert path in text
    print_help("x", "opd")
    text = capsys.readouterr().out
    assert "integer >= 1, <= 128  (16)" in text and "lambda at the first step" in text
    with pytest.raises(Mistakes, match="did you mean student"):
        print_help("x", "studnet")


def test_one_rank_speaks_for_a_node(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert mistakes(capsys, "tiny.yaml", "--opd.kapa", "3") == []


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("--opd.kapa 3", 2),
        ("--help", 0),
    ],
)
def test_answers_come_before_torch(words: str, status: int) -> None:
    code = (
        "import sys\n"
        "from smopd.train import main\n"
        "try:\n"
        "    main(sys.argv[1:])\n"
        "finally:\n"
        "    print('torch' in sys.modules, 'transformers' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words.split()], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == status, done.stderr
    assert done.stdout.splitlines()[-1] == "False False"
    assert "Traceback" not in done.stderr


OLD = {**dict.fromkeys(RENAMED, 1), **dict.fromkeys(REMOVED, 1)}


@pytest.mark.parametrize("path", sorted(OLD))
def test_a_setting_of_an_earlier_version_is_answered_with_its_name_now(folder: Path, path: str) -> None:
    given = {path.replace(".N.", ".0."): ["1"]}
    if path.startswith("merge.models"):
        given = {"merge.models": [f"[{{model: format_teacher, {path.rpartition('.')[2]}: 1}}]"]}
    with pytest.raises(Mistakes) as raised:
        read_settings("tiny.yaml", given)
    (line,) = raised.value.lines
    assert f"{path.replace('.N.', '.0.')}: " in line
    if path in RENAMED:
        new = RENAMED[path].partition(";")[0]
        assert f"is called {RENAMED[path]} now" in line
        names = [name for name, _ in settings_paths()]
        assert new.replace(".N.", ".").replace("merge.models.", "") in [
            *names,
            "max_regression",
            "exclude",
        ] or ("kwargs" in new)
    else:
        assert REMOVED[path] in line


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ("{stage: control}", "runs.gdpo.stage: is train now"),
        ("{stage: train, init: {merge: {models: []}}}", "runs.gdpo.init: is the name of a run; a merge of"),
    ],
)
def test_a_stage_or_start_of_an_earlier_version_is_answered(
    folder: Path, capsys: pytest.CaptureFixture[str], run: str, said: str
) -> None:
    (line,) = mistakes(capsys, edited(folder, "gdpo: {stage: train}", f"gdpo: {run}"))
    assert said in line
