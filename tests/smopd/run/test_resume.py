"""A command that is killed or stopped at any moment resumes bit for bit."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.patience import HANG_SECONDS
from tests.ranks import forked, wait_until
from tests.smopd.recipes import TINY, metric_lines, train, train_here, write_recipe

pytestmark = pytest.mark.slow

RUNS = ("base", "accuracy_teacher", "student")


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def after_lines(run: str, n: int) -> Callable[[Path], bool]:
    return lambda folder: lines(folder / run / "metrics.jsonl") >= n


def once_there(pattern: str) -> Callable[[Path], bool]:
    return lambda folder: any(folder.glob(pattern))


MOMENTS = {  # test_launch.py has one more: in a checkpoint
    "in the warm start": after_lines("base", 3),
    "in stage 2, between two checkpoints": after_lines("student", 3),
    "while the student is exported": once_there("student/export.partial"),
    "in the evaluation": once_there("base/evaluation.json"),
}
ONE_TEACHER = {"teachers": {"models": TINY["teachers"]["models"][:1]}}
"""A second one has its own run, and resumes as the first."""


def signal_when(number: int, moment: Callable[[Path], bool], recipe: Path, folder: Path, log: Path) -> int:
    """Start the command, send it the signal at the moment, and return its exit status."""
    words = ("-m", "smopd.train", str(recipe), "--only", *RUNS[1:])
    with forked(1, *words, cwd=recipe.parent, output=[log, log]) as (process,):
        wait_until(lambda: moment(folder), process, log)
        os.kill(process.pid, number)
        process.join(HANG_SECONDS)
        return process.exitcode


def assert_same_runs(found: Path, expected: Path, runs: tuple[str, ...] = RUNS) -> None:
    for run in runs:
        assert metric_lines(found / run) == metric_lines(expected / run), run
        for file in ("export/model.safetensors", "evaluation.json", "responses.jsonl", "samples.jsonl"):
            if run != "base" or file != "samples.jsonl":
                assert (found / run / file).read_bytes() == (expected / run / file).read_bytes(), (run, file)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run without interruption."""
    folder = tmp_path_factory.mktemp("straight")
    done = train_here(write_recipe(folder, ONE_TEACHER), "--only", *RUNS[1:])
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / "runs/tiny"


def test_a_run_killed_again_and_again_ends_the_same(tmp_path, straight):
    recipe, folder = write_recipe(tmp_path, ONE_TEACHER), tmp_path / "runs/tiny"
    for moment in MOMENTS.values():
        assert signal_when(signal.SIGKILL, moment, recipe, folder, tmp_path / "log") == -signal.SIGKILL
    done = train_here(recipe, "--only", *RUNS[1:])
    assert done.returncode == 0, done.stderr[-4000:]
    assert_same_runs(folder, straight)


def test_a_signal_ends_a_run_after_its_step_with_a_checkpoint(tmp_path, straight):
    recipe = write_recipe(tmp_path, ONE_TEACHER | {"checkpoint": {"every": 100}})
    folder, log, moment = tmp_path / "runs/tiny", tmp_path / "log", after_lines("accuracy_teacher", 2)
    assert signal_when(signal.SIGTERM, after_lines("base", 3), recipe, folder, log) == 143
    (saved,) = (folder / "base/checkpoints").iterdir()
    done = lines(folder / "base/metrics.jsonl")
    assert f"warm-start step {done} is done and saved" in log.read_text() and 3 <= done < 6
    assert saved.name == f"step_{done:08d}"
    assert signal_when(signal.SIGTERM, moment, recipe, folder, log) == 143
    assert not (folder / "base/checkpoints").exists()
    (saved,) = (folder / "accuracy_teacher/checkpoints").iterdir()
    step = int(saved.name.removeprefix("step_"))
    assert f"stopped by SIGTERM; step {step} is done and saved; rerun to resume" in log.read_text()
    assert "Traceback" not in log.read_text()
    assert step == lines(folder / "accuracy_teacher/metrics.jsonl") < 4
    done = train_here(recipe, "--only", "accuracy_teacher")
    assert done.returncode == 0, done.stderr[-4000:]
    assert_same_runs(folder, straight, ("base", "accuracy_teacher"))


FAILING = """
from pathlib import Path
from smopd.rewards import rlla

steps = []

def accuracy(prompts, completions, training_step=None, **columns):
    steps.append(training_step)
    if Path("broken").exists() and not training_step and any(steps):  # not before the first step
        raise RuntimeError("the judge is gone")
    return rlla.accuracy_reward(prompts, completions, **columns)
"""


def test_a_reward_that_ends_an_evaluation_on_two_ranks_leaves_what_is_done(tmp_path):
    """Once it works again, the command resumes bit for bit. In a step: test_multi_turn.py."""
    (tmp_path / "failing.py").write_text(FAILING)
    more = {
        "rewards": [{**TINY["rewards"][0], "function": "failing:accuracy"}, TINY["rewards"][1]],
        "scoring": {"max_unscorable_share": 0.0},
        "checkpoint": {"every": 100},
        "evaluation": {"every": 1},
        "loop": {"steps": 2},
    }
    recipe, run = write_recipe(tmp_path, more, drop=("warm_start",)), "accuracy_teacher"
    assert train(recipe, "--only", run, ranks=2).returncode == 0
    expected = (tmp_path / "runs").rename(tmp_path / "expected") / "tiny"
    (tmp_path / "broken").touch()
    ended = train(recipe, "--only", run, ranks=2)
    assert ended.returncode == 1 and "pipeline.py" not in ended.stderr, ended.stderr[-4000:]
    assert ended.stderr.count("step 1 is done and saved; rerun to resume") == 1
    assert "the judge is gone" in ended.stderr and ended.stderr.count("\nerror: ") == 1
    folder = tmp_path / "runs/tiny"
    assert [path.name for path in (folder / run / "checkpoints").iterdir()] == ["step_00000001"]
    (tmp_path / "broken").unlink()
    assert train(recipe, "--only", run, ranks=2).returncode == 0
    assert_same_runs(folder, expected, (run,))


def test_finished_runs_are_not_done_again(straight):
    before = {path: path.stat().st_mtime_ns for path in straight.rglob("*.safetensors")}
    done = train_here(straight.parents[1] / "recipe.yaml", "--only", *RUNS[1:])
    assert done.returncode == 0, done.stderr[-4000:]
    assert {path: path.stat().st_mtime_ns for path in straight.rglob("*.safetensors")} == before
