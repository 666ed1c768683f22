"""Two processes from one command, as the quickstart runs: errors once, without noise, and death together."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from smopd.engine.process import below, children, runs
from tests import warm
from tests.patience import HANG_SECONDS
from tests.smopd.recipes import command, environment, metric_lines, train, write_recipe

pytestmark = pytest.mark.slow

TWO = {"processes": 2, "loop": {"steps": 4}, "checkpoint": {"every": 2}}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    recipe = write_recipe(folder, TWO)
    done = train(recipe, "--output", str(folder / "out"), cold=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / "out"


def test_each_rank_takes_part(straight):
    assert (straight / "rewards_1.log").exists()
    assert '"world_size": 2' in (straight / "environment.json").read_text()


def start_and_wait_for(pattern: str, n: int, recipe: Path, output: Path) -> subprocess.Popen:
    """The command, once a file of its run directory has `n` lines; a folder is enough where it is there."""
    process = warm.Popen(
        command(recipe, "--output", str(output)),
        env=environment(),
        cwd=recipe.parent,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + HANG_SECONDS
    while not any(path.is_dir() or path.read_bytes().count(b"\n") >= n for path in output.glob(pattern)):
        assert process.poll() is None and time.monotonic() < deadline, (
            "the run ended before it could be killed"
        )
        time.sleep(0.002)
    return process


def wait_until_none_is_left(process: subprocess.Popen, others: list[int]) -> None:
    process.wait()
    deadline = time.monotonic() + 300
    while (left := [other for other in others if runs(other)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


def test_killed_together_or_one_by_one_the_ranks_go_on_as_if_nothing_had_been(tmp_path, straight):
    recipe, output = write_recipe(tmp_path, TWO), tmp_path / "out"
    command_killed = start_and_wait_for("accuracy_teacher/metrics.jsonl", 3, recipe, output)
    ranks, all_below = children(command_killed.pid), below(command_killed.pid)
    assert len(ranks) == 2
    os.kill(command_killed.pid, signal.SIGKILL)
    wait_until_none_is_left(command_killed, all_below)
    for moment in ("student/checkpoints/*.partial", "student/export.partial"):
        rank_killed = start_and_wait_for(moment, 0, recipe, output)
        ranks, all_below = children(rank_killed.pid), below(rank_killed.pid)
        os.kill(max(ranks), signal.SIGKILL)
        wait_until_none_is_left(rank_killed, all_below)
        assert rank_killed.returncode != 0
    done = train(recipe, "--output", str(output))
    assert done.returncode == 0, done.stderr[-4000:]
    for run in ("base", "accuracy_teacher", "format_teacher", "student"):
        assert metric_lines(output / run) == metric_lines(straight / run)
        weights = [(folder / run / "export/model.safetensors").read_bytes() for folder in (output, straight)]
        assert weights[0] == weights[1]


def test_a_signal_to_the_command_ends_both_ranks_after_their_step(tmp_path):
    recipe, output = write_recipe(tmp_path, {**TWO, "checkpoint": {"every": 100}}), tmp_path / "out"
    running = warm.Popen(
        command(recipe, "--output", str(output)), env=environment(), cwd=tmp_path, stderr=subprocess.PIPE
    )
    while not any(path.read_bytes() for path in output.glob("accuracy_teacher/metrics.jsonl")):
        assert running.poll() is None
        time.sleep(0.002)
    all_below = below(running.pid)
    running.send_signal(signal.SIGINT)
    _, told = running.communicate(timeout=HANG_SECONDS)
    assert running.returncode == 130 and b"Traceback" not in told, told.decode()[-4000:]
    assert told.count(b"is done and saved; rerun to resume") == 1
    assert list(output.glob("accuracy_teacher/checkpoints/step_0000000?"))
    wait_until_none_is_left(running, all_below)


def test_a_signal_before_anything_is_there_ends_the_command_in_silence(tmp_path):
    recipe = write_recipe(tmp_path, TWO)
    running = subprocess.Popen(
        command(recipe), env=environment() | {"PYTHONVERBOSE": "1"}, cwd=tmp_path, stderr=subprocess.PIPE
    )
    assert running.stderr is not None
    told = b""
    while b"import 'torch" not in told:
        told = running.stderr.readline()
        assert told, "torch is imported after the command has begun"
    running.send_signal(signal.SIGINT)
    _, told = running.communicate(timeout=HANG_SECONDS)
    assert running.returncode == -signal.SIGINT and b"Traceback" not in told


def test_a_mistake_is_said_once(straight):
    recipe = straight.parent / "recipe.yaml"
    done = train(recipe, "--output", str(straight), "--opd.kappa", "32")
    assert done.returncode == 1
    assert done.stderr.count("opd.kappa: was 16, now 32") == 1
    assert "Traceback" not in done.stderr


def test_a_second_command_in_the_same_directory_is_refused(tmp_path):
    recipe, output = write_recipe(tmp_path, {"warm_start": {"steps": 100_000}}), tmp_path / "out"
    first = warm.Popen(
        command(recipe, "--output", str(output)),
        env=environment(),
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + HANG_SECONDS
        while not (output / "base/metrics.jsonl").exists():
            assert first.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        second = train(recipe, "--output", str(output))
        assert second.returncode == 1
        assert "another command is at work there" in second.stderr
    finally:
        first.kill()
        first.wait()
