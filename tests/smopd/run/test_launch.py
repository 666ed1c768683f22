"""Two ranks, from one command or under torchrun: errors are printed once, and all ranks end together."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from smopd import train
from smopd.config.settings import merged
from smopd.engine.distributed import process_group
from smopd.engine.process import below, runs, stop_signals
from tests.patience import HANG_SECONDS
from tests.ranks import environment, forked, on_ranks, wait_until
from tests.smopd.recipes import metric_lines, train_here, write_recipe

pytestmark = pytest.mark.slow

TWO = {"loop": {"steps": 2}, "data": {"evaluation": None}, "checkpoint": {"every": 1}}
TWO |= {"loss": {"entropy_coef": 0.1}}  # a gradient if no reward differs
ENDLESS = merged(TWO, {"loop": {"steps": 100_000}, "checkpoint": {"every": 0}})
FIRST = "accuracy_teacher/metrics.jsonl"
CHECKPOINTS = "out/accuracy_teacher/checkpoints"
OUTPUT = ("--output", "out", "--only", "accuracy_teacher")
TRAIN = ("-m", "smopd.train", "recipe.yaml", *OUTPUT)
LAUNCH = (*TRAIN, "--processes", "2")


def assert_none_is_left(processes: list[int]) -> None:
    deadline = time.monotonic() + 300
    while any(map(runs, processes)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_ranks_end_with_their_launcher_or_another_rank_and_resume_as_if_nothing_had_been(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
        write_recipe(folder, TWO, drop=("warm_start",))
    assert on_ranks(2, *TRAIN, cwd=whole).returncode == 0
    log = [tmp_path / "log"] * 2
    with forked(1, *LAUNCH, cwd=killed, output=log) as (launcher,):
        wait_until(lambda: len(below(launcher.pid)) == 2, launcher, log[0])
        all_below = below(launcher.pid)
        launcher.kill()
        assert_none_is_left(all_below)
    with forked(2, *TRAIN, cwd=killed, output=log) as ranks:
        wait_until(lambda: any(killed.glob(f"{CHECKPOINTS}/step_00000002.partial")), ranks[0], log[0])
        ranks[1].kill()
        ranks[0].join(HANG_SECONDS)
    assert log[0].read_text().count("error: another rank has ended") == 1
    assert "Traceback" not in log[0].read_text()
    done = on_ranks(2, *TRAIN, cwd=killed)
    assert done.returncode == 0, done.stderr[-4000:]
    output, straight = killed / "out", whole / "out"
    assert (output / "rewards_1.log").exists()
    assert '"world_size": 2' in (output / "environment.json").read_text()
    found, expected = (folder / "accuracy_teacher" for folder in (output, straight))
    assert metric_lines(found) == metric_lines(expected)
    weights = [(folder / "export/model.safetensors").read_bytes() for folder in (found, expected)]
    assert weights[0] == weights[1] and metric_lines(found)[1]["grad_norm"] > 0


def test_a_second_command_is_refused_and_a_signal_ends_both_ranks_after_their_step(tmp_path):
    recipe, log = write_recipe(tmp_path, ENDLESS, drop=("warm_start",)), tmp_path / "log"
    with forked(1, *LAUNCH, cwd=tmp_path, output=[log, log]) as (launcher,):
        wait_until((tmp_path / "out" / FIRST).exists, launcher, log)
        second = train_here(recipe, *OUTPUT)
        assert second.returncode == 1 and "another command is at work there" in second.stderr
        all_below = below(launcher.pid)
        os.kill(launcher.pid, signal.SIGINT)
        launcher.join(HANG_SECONDS)
        assert launcher.exitcode == 130
        assert_none_is_left(all_below)
    text = log.read_text()
    assert text.count("is done and saved; rerun to resume") == 1 and "Traceback" not in text, text[-4000:]
    assert list(tmp_path.glob(f"{CHECKPOINTS}/step_*"))


def test_a_stopped_rank_ends_the_run_after_the_time_out(tmp_path):
    write_recipe(tmp_path, ENDLESS, drop=("warm_start",))
    log, words = tmp_path / "log", (*TRAIN, "--loop.timeout_seconds", "8")
    with forked(2, *words, cwd=tmp_path, output=[log, log]) as (first, stopped):
        wait_until((tmp_path / "out" / FIRST).exists, first, log)
        os.kill(stopped.pid, signal.SIGSTOP)
        began = time.monotonic()
        first.join(HANG_SECONDS)
        assert first.exitcode == 1 and 5 < time.monotonic() - began < 90
    text = log.read_text()
    assert len(re.findall(r"error: rank \d has given no sign of life for 8 seconds; rerun", text)) == 1
    assert 'File "' not in text.partition("error: rank")[0] and "Timed out" not in text, text[-4000:]


RANK = """#!/bin/bash
trap "touch terminated" TERM
echo "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $@" > "rank_$RANK"
until [ "$RANK" = 1 -a -e rank_0 ]; do sleep 0.05; done
exit 3
"""


def test_when_a_rank_fails_the_launcher_ends_the_others_by_force_if_needed(tmp_path, monkeypatch) -> None:
    (tmp_path / "python").write_text(RANK)
    (tmp_path / "python").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(train, "END_SECONDS", 1.0)
    handlers = {number: signal.getsignal(number) for number in stop_signals()}
    try:
        assert train.launch(["r.yaml", "--seed", "1"], 2) == 3
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    words = "2 2 127.0.0.1 -m smopd.train r.yaml --seed 1\n"
    assert [(tmp_path / f"rank_{rank}").read_text() for rank in (0, 1)] == [f"0 0 {words}", f"1 1 {words}"]
    assert (tmp_path / "terminated").exists()


BY_RANK = """
import os, sys
from smopd.train import main
from smopd.worlds import toy_world

def rows(n, seed):
    return toy_world.prompts(n=n, seed=seed + int(os.environ["RANK"]))

if __name__ == "__main__":
    sys.exit(main(["recipe.yaml", "--seed", os.environ["RANK"]]))
"""


def test_ranks_with_other_settings_or_rows_are_named_and_a_dry_run_has_one_model(tmp_path):
    (tmp_path / "by_rank.py").write_text(BY_RANK)
    write_recipe(tmp_path, {"data": {"train": {"source": "by_rank:rows"}}})
    for words, said in (
        (["by_rank.py"], "error: seed: rank 0 has 0, rank 1 has 1; start all ranks by one command"),
        (TRAIN, "error: data.train: rank 0 has "),
    ):
        done = on_ranks(2, *words, cwd=tmp_path)
        assert done.returncode == 1 and done.stderr.count("error: ") == 1 and said in done.stderr, done.stderr
    done = on_ranks(2, *TRAIN, "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("processes", "status"), [("1", -signal.SIGINT), ("2", 128 + signal.SIGINT)])
def test_a_signal_before_anything_is_there_ends_the_command_in_silence(processes, status, tmp_path):
    recipe = write_recipe(tmp_path, TWO)
    words = [sys.executable, "-m", "smopd.train", str(recipe), "--processes", processes]
    text = b""
    verbose = environment() | {"PYTHONVERBOSE": "1"}
    with subprocess.Popen(words, env=verbose, stderr=subprocess.PIPE) as running:
        assert running.stderr is not None
        while b"import 'torch" not in text:
            text = running.stderr.readline()
            assert text, "torch is imported after the command has begun"
        running.send_signal(signal.SIGINT)
        _, text = running.communicate(timeout=HANG_SECONDS)
    assert running.returncode == status and b"Traceback" not in text, text[-4000:].decode()


def test_a_rank_without_a_launcher_or_a_gpu_is_told(monkeypatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit, match=r"error: RANK is set: .*WORLD_SIZE expected"), process_group():
        pass
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    for local, message in (("2", "error: 4 processes for 2 GPUs; start one for each"), ("3", "1")):
        monkeypatch.setenv("LOCAL_RANK", local)
        with pytest.raises(SystemExit, match=message), process_group():
            pass
