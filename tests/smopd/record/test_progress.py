"""The progress line, on a terminal and in a file."""

import math
import os
import subprocess
import sys

import pytest

from smopd.record.progress import Progress, say


def test_an_evaluation_of_the_same_step_is_a_line_of_its_own_and_stays(capsys) -> None:
    with Progress("x", 3) as shown:
        shown.update(1, {"reward/length/mean": -0.5, "kl": 0.0123, "tokens_per_second": 4123.4})
        shown.update(1, {"greedy/format": 0.9})
        shown.update(3, {"kl": math.nan, "teacher_mass": None, "reward/a/mean": math.inf})
    first, evaluated, odd = capsys.readouterr().out.splitlines()
    assert all(text in first for text in ("kl 0.012", "reward length -0.50", "tok/s 4,123"))
    assert "greedy format 0.90" in evaluated and "length" not in evaluated and "greedy" not in first
    assert all(text in odd for text in ("greedy format 0.90", "kl nan", "a inf")) and "mass" not in odd


def test_messages_are_said_as_they_are_but_for_what_a_terminal_would_obey(capsys) -> None:
    say("[bold]no markup[/bold] " + "x" * 300 + "\x1b]0;title\x07b\x9b2Jc\td")
    with Progress("run", 1) as shown:
        shown.update(1, {"reward/\x1b[2Jname/mean": 1.0})
    out = capsys.readouterr().out
    assert out.startswith("[bold]no markup[/bold] " + "x" * 300 + "\ufffd]0;title\ufffdb\ufffd2Jc")
    assert "\ufffd[2Jname" in out and not set(out) & {"\x1b", "\x07", "\x9b"}


LOST = """
import os, sys
from smopd.record.progress import say
say("first")
os.write(int(sys.argv[1]), b"x")
for _ in range(3):
    say("more")
sys.exit(7)
"""


@pytest.mark.parametrize("kind", ["full", "closed"])
def test_a_run_outlives_its_standard_output(kind):
    read, write = os.pipe()
    if kind == "full":
        target = os.open("/dev/full", os.O_WRONLY)
    else:
        unread, target = os.pipe()
        os.close(unread)
    words, streams = [sys.executable, "-c", LOST, str(write)], {"stdout": target, "stderr": subprocess.PIPE}
    done = subprocess.run(words, **streams, pass_fds=[write], text=True)
    assert (done.returncode, os.read(read, 1)) == (7, b"x")
    assert done.stderr == "standard output cannot be written; the run continues, see its metrics.jsonl\n"
    for end in (read, write, target):
        os.close(end)


def test_closed_standard_streams_are_replaced_before_a_file_gets_their_numbers():
    code = "import os, smopd.extra; from smopd.record.progress import say; say(''); assert os.dup(0) > 2"
    words = ["sh", "-c", '"$0" -c "$1" <&- >&- 2>&-', sys.executable, code]
    assert subprocess.run(words).returncode == 0
