"""Resuming after SIGKILL.

A command killed with SIGKILL at any moment and given again ends as one that was not killed, bit for bit.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests import warm
from tests.patience import HANG_SECONDS
from tests.smopd.recipes import TINY, command, environment, metric_lines, train, train_here, write_recipe

pytestmark = pytest.mark.slow

RUNS = ("base", "accuracy_teacher", "format_teacher", "student")


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def after_lines(run: str, n: int) -> Callable[[Path], bool]:
    return lambda folder: lines(folder / run / "metrics.jsonl") >= n


def once_there(pattern: str) -> Callable[[Path], bool]:
    return lambda folder: any(folder.glob(pattern))


MOMENTS = {
    "in the warm start": after_lines("base", 5),
    "before the first checkpoint": after_lines("accuracy_teacher", 1),
    "while a checkpoint is written": once_there("*/checkpoints/*.partial"),
    "between two checkpoints": after_lines("format_teacher", 3),
    "at the end of a run": after_lines("format_teacher", 6),
    "in stage 2": after_lines("student", 5),
    "while the student's checkpoint is written": once_there("student/checkpoints/*.partial"),
    "while the student is exported": once_there("student/export.partial"),
    "in the evaluation": once_there("base/evaluation.json"),
}


def kill_when(moment: Callable[[Path], bool], recipe: Path, folder: Path, log: Path) -> bool:
    """Starts the command and kills it at the moment; False where it ended first."""
    with log.open("ab") as output:
        process = warm.Popen(
            command(recipe), env=environment(), cwd=recipe.parent, stdout=output, stderr=output
        )
    deadline = time.monotonic() + HANG_SECONDS
    while process.poll() is None:
        if moment(folder):
            process.send_signal(signal.SIGKILL)
            process.wait()
            return True
        if time.monotonic() > deadline:
            process.kill()
            process.wait()
            pytest.fail(f"it hung: {log.read_text()[-4000:]}")
        time.sleep(0.002)
    assert process.returncode == 0, log.read_text()[-4000:]
    return False


def assert_same_runs(found: Path, expected: Path) -> None:
    for run in RUNS:
        assert metric_lines(found / run) == metric_lines(expected / run), run
        a, b = (load_file(folder / run / "export/model.safetensors") for folder in (found, expected))
        assert a.keys() == b.keys()
        for name in a:
            assert a[name].equal(b[name]), f"{run}: {name}"
        for file in ("evaluation.json", "responses.jsonl"):
            assert (found / run / file).read_bytes() == (expected / run / file).read_bytes()
    for run in RUNS[1:]:
        assert (found / run / "samples.jsonl").read_bytes() == (expected / run / "samples.jsonl").read_bytes()


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The run that nobody killed."""
    folder = tmp_path_factory.mktemp("straight")
    recipe = write_recipe(folder)
    done = train(recipe, cold=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / "runs/tiny"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_run_after_its_step_with_a_checkpoint(tmp_path, straight, number):
    recipe, folder = write_recipe(tmp_path, {"checkpoint": {"every": 100}}), tmp_path / "runs/tiny"
    log = tmp_path / "log"
    with log.open("wb") as output:
        run = warm.Popen(command(recipe), env=environment(), cwd=tmp_path, stdout=output, stderr=output)
    while not after_lines("accuracy_teacher", 2)(folder):
        assert run.poll() is None, log.read_text()[-4000:]
        time.sleep(0.002)
    run.send_signal(number)
    assert run.wait(HANG_SECONDS) == 128 + number
    told = log.read_text()
    (saved,) = (folder / "accuracy_teacher/checkpoints").iterdir()
    step = int(saved.name.removeprefix("step_"))
    assert f"stopped by {number.name}; step {step} is done and saved; rerun to resume" in told
    assert "Traceback" not in told and step == lines(folder / "accuracy_teacher/metrics.jsonl") < 6
    done = train_here(recipe)
    assert done.returncode == 0, done.stderr[-4000:]
    assert_same_runs(folder, straight)


FAILING = """
from pathlib import Path
from smopd.rewards import rlla

def accuracy(prompts, completions, training_step=None, **columns):
    if Path("broken").exists() and WHEN:
        raise RuntimeError("the judge is gone")
    return rlla.accuracy_reward(prompts, completions, **columns)
"""
IN_A_STEP, IN_AN_EVALUATION = "training_step and training_step[0] == 3", "not training_step"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("when", "kept"), [(IN_A_STEP, 3), (IN_AN_EVALUATION, 2)], ids=["step", "evaluation"]
)
def test_a_reward_that_ends_a_run_leaves_what_is_done(tmp_path, when, kept, ranks):
    """Mended, the same command ends as if nothing had been."""
    (tmp_path / "failing.py").write_text(FAILING.replace("WHEN", when))
    rewards = [{**TINY["rewards"][0], "function": "failing:accuracy"}, TINY["rewards"][1]]
    more = {
        "scoring": {"max_unscorable_share": 0.0},
        "checkpoint": {"every": 100},
        "evaluation": {"every": 2},
    }
    recipe = write_recipe(tmp_path, {"rewards": rewards, "processes": ranks, **more}, drop=("warm_start",))
    only, run = ("--only", "accuracy_teacher"), "runs/tiny/accuracy_teacher"
    call = train_here if ranks == 1 else train
    assert call(recipe, *only).returncode == 0
    expected = (tmp_path / run).rename(tmp_path / "expected")
    (tmp_path / "broken").touch()
    ended = train(recipe, *only)
    assert ended.returncode == 1 and "pipeline.py" not in ended.stderr, ended.stderr[-4000:]
    assert ended.stderr.count(f"step {kept} is done and saved; rerun to resume") == 1
    assert "the judge is gone" in ended.stderr
    assert [path.name for path in (tmp_path / run / "checkpoints").iterdir()] == [f"step_{kept:08d}"]
    (tmp_path / "broken").unlink()
    assert call(recipe, *only).returncode == 0
    assert metric_lines(tmp_path / run) == metric_lines(expected)
    for file in ("export/model.safetensors", "samples.jsonl", "responses.jsonl"):
        assert (tmp_path / run / file).read_bytes() == (expected / file).read_bytes()


def test_a_run_killed_again_and_again_ends_the_same(tmp_path, straight):
    recipe, folder = write_recipe(tmp_path), tmp_path / "runs/tiny"
    for name, moment in MOMENTS.items():
        assert kill_when(moment, recipe, folder, tmp_path / "log"), f"the run ended before: {name}"
    done = train(recipe)
    assert done.returncode == 0, done.stderr[-4000:]
    assert_same_runs(folder, straight)


def test_finished_runs_are_not_done_again(straight):
    before = {path: path.stat().st_mtime_ns for path in straight.rglob("*.safetensors")}
    done = train_here(straight.parents[1] / "recipe.yaml")
    assert done.returncode == 0, done.stderr[-4000:]
    assert {path: path.stat().st_mtime_ns for path in straight.rglob("*.safetensors")} == before
    assert "accuracy_teacher  1/6" not in done.stdout
