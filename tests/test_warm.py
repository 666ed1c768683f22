"""A warm process is what subprocess would have started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm

TELLS = """
import json, os, sys
print(json.dumps([sys.argv[1:], os.getcwd(), sorted(os.environ), sys.path[:2], __name__, os.getppid()]))
print("an error", file=sys.stderr)
if sys.argv[1:] == ["waits"]:
    input()
    os.kill(os.getpid(), 9)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    (tmp_path / "tells.py").write_text(TELLS)
    return [sys.executable, "tells.py"]


@pytest.mark.slow
def test_status_streams_folder_environment_and_parent_are_those_of_a_cold_one(command, tmp_path):
    options = {"cwd": tmp_path, "env": {"PYTHONPATH": "/nowhere", "HOME": "/"}, "text": True}
    cold, here = (how.run([*command, "3"], capture_output=True, **options) for how in (subprocess, warm))
    assert cold.returncode == 3 and f", {os.getpid()}]" in cold.stdout
    without_locale = cold.stdout.replace('"LC_CTYPE", ', "")  # which a cold one sets itself
    assert (here.returncode, here.stdout, here.stderr) == (3, without_locale, cold.stderr)


@pytest.mark.slow
def test_it_reads_and_can_be_killed(command, tmp_path):
    with warm.Popen([*command, "waits"], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as one:
        assert one.stdout.readline() and one.poll() is None
        one.communicate(b"\n")
    assert one.returncode == -signal.SIGKILL
    with warm.Popen(
        [*command, "waits"], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        other.terminate()
    assert other.returncode == -signal.SIGTERM


@pytest.mark.slow
def test_ranks_and_their_failure(command, tmp_path):
    done = warm.on_ranks(2, str(tmp_path / "tells.py"), "0")
    assert done.returncode == 0 and done.stdout.count('"__main__"') == 2
    failed = warm.on_ranks(2, str(tmp_path / "tells.py"), "7")
    assert failed.returncode == 1 and "exitcode  : 7" in failed.stderr
