"""Two ranks, from one command or under torchrun: errors are printed once, and all ranks end together."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from smopd.engine.process import below, children, runs
from tests.patience import HANG_SECONDS
from tests.ranks import environment, torchrun
from tests.smopd.recipes import command, metric_lines, train, train_here, write_recipe

pytestmark = pytest.mark.slow

TWO = {"processes": 2, "loop": {"steps": 4}, "checkpoint": {"every": 2}}
ENDLESS = {"processes": 2, "loop": {"steps": 100_000}, "checkpoint": {"every": 0}}
FIRST = "accuracy_teacher/metrics.jsonl"
ONE_RUN = ("--only", "accuracy_teacher")


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    done = train(write_recipe(folder, TWO), "--output", str(folder / "out"), *ONE_RUN)
    assert done.returncode == 0, done.stderr[-4000:]
    assert (folder / "out/rewards_1.log").exists()
    assert '"world_size": 2' in (folder / "out/environment.json").read_text()
    return folder / "out"


def start(words: list[str], folder: Path) -> subprocess.Popen:
    """Start the command with its output in a file."""
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(words, env=environment(), cwd=folder, stdout=log, stderr=log)


def wait_for(process: subprocess.Popen, moment) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while not moment():
        assert process.poll() is None and time.monotonic() < deadline, "the run ended before"
        time.sleep(0.002)


def none_is_left(processes: list[int]) -> bool:
    deadline = time.monotonic() + 300
    while any(map(runs, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(runs, processes))


def test_killed_together_or_one_by_one_the_ranks_resume_as_if_nothing_had_been(tmp_path, straight):
    recipe, output = write_recipe(tmp_path, TWO), tmp_path / "out"
    words = ("--output", str(output), *ONE_RUN)
    for ranks, moment in (
        (1, "accuracy_teacher/checkpoints/*.partial"),
        (2, "accuracy_teacher/export.partial"),
    ):
        running = start(command(recipe, *words, ranks=ranks), tmp_path)  # with our launcher, with torchrun
        wait_for(running, lambda pattern=moment: any(output.glob(pattern)))
        all_below = below(running.pid)
        assert len(all_below) >= 2
        os.kill(running.pid if ranks == 1 else max(children(running.pid)), signal.SIGKILL)
        assert running.wait(HANG_SECONDS) != 0 and none_is_left(all_below)
    done = train(recipe, *words)
    assert done.returncode == 0, done.stderr[-4000:]
    for run in ("base", "accuracy_teacher"):
        assert metric_lines(output / run) == metric_lines(straight / run)
        weights = [(folder / run / "export/model.safetensors").read_bytes() for folder in (output, straight)]
        assert weights[0] == weights[1]


def test_a_second_command_is_refused_and_a_signal_ends_both_ranks_after_their_step(tmp_path):
    recipe, output = write_recipe(tmp_path, ENDLESS), tmp_path / "out"
    running = start(command(recipe, "--output", str(output)), tmp_path)
    wait_for(running, (output / FIRST).exists)
    second = train_here(recipe, "--output", str(output))
    assert second.returncode == 1 and "another command is at work there" in second.stderr
    all_below = below(running.pid)
    running.send_signal(signal.SIGINT)
    assert running.wait(HANG_SECONDS) == 130 and none_is_left(all_below)
    told = (tmp_path / "log").read_text()
    assert told.count("is done and saved; rerun to resume") == 1 and "Traceback" not in told, told[-4000:]
    assert list(output.glob("accuracy_teacher/checkpoints/step_*"))


IMPATIENT = """
import sys
from smopd.config.settings import Settings
from smopd.train import main

if __name__ == "__main__":
    Settings.waiting_seconds = property(lambda settings: 10.0)
    sys.exit(main(sys.argv[1:]))
"""


def test_a_stopped_rank_ends_the_run_after_the_time_out(tmp_path):
    recipe, output = write_recipe(tmp_path, ENDLESS), tmp_path / "out"
    (tmp_path / "impatient.py").write_text(IMPATIENT)
    running = start([*torchrun(2), "impatient.py", str(recipe), "--output", str(output)], tmp_path)
    wait_for(running, (output / FIRST).exists)
    stopped = max(children(running.pid))
    os.kill(stopped, signal.SIGSTOP)
    log = tmp_path / "log"
    wait_for(running, lambda: "error: another rank" in log.read_text())
    os.kill(stopped, signal.SIGKILL)  # the launcher would wait 30 seconds for it
    assert running.wait(HANG_SECONDS) != 0
    told = log.read_text()
    assert told.count("error: another rank has not answered for 10 seconds") == 1
    assert 'File "' not in told.partition("error: another rank")[0], told[-4000:]


def test_a_signal_before_anything_is_there_ends_the_command_in_silence(tmp_path):
    words = command(write_recipe(tmp_path, TWO))
    told = b""
    with subprocess.Popen(
        words, env=environment() | {"PYTHONVERBOSE": "1"}, stderr=subprocess.PIPE
    ) as running:
        assert running.stderr is not None
        while b"import 'torch" not in told:
            told = running.stderr.readline()
            assert told, "torch is imported after the command has begun"
        running.send_signal(signal.SIGINT)
        _, told = running.communicate(timeout=HANG_SECONDS)
    assert running.returncode == -signal.SIGINT and b"Traceback" not in told
