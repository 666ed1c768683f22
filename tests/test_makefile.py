"""Where the Makefile looks for torch: the package index, or PyTorch's own address of builds for CPUs."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PLAIN, CPU = "plain", "with the address"
FAKE = """#!/bin/sh
echo "$*" >> "$(dirname "$0")/calls"
case "$*" in *--extra-index-url*) exit {cpu};; *) exit {plain};; esac
"""


@pytest.fixture
def answers(tmp_path: Path) -> Iterator[str]:
    """The address of a server that has a page for torch."""
    (tmp_path / "index" / "torch").mkdir(parents=True)
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "index"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def refuses() -> str:
    """An address at which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def hangs() -> Iterator[str]:
    """An address at which a connection is taken and nothing said."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


class Made:
    """`make` of the file that says that torch is there, with a pip that exits as told."""

    def __init__(self, folder: Path, address: str, driver: str = "", plain: int = 0, cpu: int = 0) -> None:
        python = folder / "venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(FAKE.format(plain=plain, cpu=cpu))
        python.chmod(0o755)
        words = [f"VENV={folder / 'venv'}", f"PYTHON={sys.executable}", f"NVIDIA_DRIVER={driver}"]
        command = ["make", "-C", ROOT, *words, f"TORCH_CPU_INDEX={address}", folder / "venv" / ".torch"]
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
        self.status, self.stderr = done.returncode, done.stderr
        calls = (python.parent / "calls").read_text().splitlines()
        assert all("-c constraints/tested.txt" in call and call.endswith("wheel torch") for call in calls)
        self.asked = [CPU if f"--extra-index-url {address} " in call else PLAIN for call in calls]


def test_without_a_driver_the_builds_for_cpus_come_first(tmp_path: Path, answers: str) -> None:
    made = Made(tmp_path, answers)
    assert (made.status, made.asked) == (0, [CPU])


def test_with_a_driver_the_package_index_comes_first(tmp_path: Path, answers: str) -> None:
    made = Made(tmp_path, answers, driver="/dev/nvidiactl")
    assert (made.status, made.asked) == (0, [PLAIN])


def test_where_the_index_has_no_such_build_the_address_is_asked(tmp_path: Path, answers: str) -> None:
    made = Made(tmp_path, answers, driver="/dev/nvidiactl", plain=1)
    assert (made.status, made.asked) == (0, [PLAIN, CPU])


def test_an_address_that_is_not_reached_does_no_harm(tmp_path: Path, refuses: str) -> None:
    made = Made(tmp_path, refuses)
    assert (made.status, made.asked) == (0, [PLAIN])


def test_an_address_that_hangs_is_given_three_seconds(tmp_path: Path, hangs: str) -> None:
    begun = time.monotonic()
    made = Made(tmp_path, hangs)
    assert (made.status, made.asked) == (0, [PLAIN])
    assert 3 <= time.monotonic() - begun < 30


def test_where_nothing_has_it_one_line_says_what_to_set(tmp_path: Path, refuses: str) -> None:
    made = Made(tmp_path, refuses, plain=1)
    assert (made.status != 0, made.asked) == (True, [PLAIN])
    (line,) = (line for line in made.stderr.splitlines() if not line.startswith("make"))
    assert refuses in line and "TORCH_CPU_INDEX=ADDRESS" in line
