"""Signals are forwarded to the run of a seed, which ends in its own time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.patience import HANG_SECONDS
from tests.smopd.recipes import ROOT, environment

CHILD = """
import signal, sys, time
def end(number, frame):
    time.sleep(0.3)
    open(sys.argv[1], "w").write("saved")
    sys.exit(128 + number)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, end)
print("ready", flush=True)
time.sleep(3600)
"""
PARENT = "import sys; from smopd.seeds import run; sys.exit(run([sys.executable, *sys.argv[1:]]))"


@pytest.mark.parametrize(
    ("number", "to_all"),
    [(signal.SIGTERM, False), (signal.SIGINT, True)],
    ids=["to the parent", "to both, as by Ctrl-C"],
)
def test_a_seeds_run_ends_by_a_signal_in_its_own_time(tmp_path, number, to_all):
    (tmp_path / "child.py").write_text(CHILD)
    command = [sys.executable, "-c", PARENT, str(tmp_path / "child.py"), str(tmp_path / "end")]
    parent = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, start_new_session=True
    )
    assert parent.stdout is not None and parent.stdout.readline() == b"ready\n"
    time.sleep(0.1)
    (os.killpg if to_all else os.kill)(parent.pid, number)
    assert parent.wait(HANG_SECONDS) == 128 + number
    assert (tmp_path / "end").read_text() == "saved"
