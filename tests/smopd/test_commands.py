"""The commands under one name: each has its own help, without torch, and says what is missing."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module

import pytest

import smopd
from smopd.__main__ import COMMANDS, main
from smopd.extra import TRAIN
from tests.smopd.recipes import ROOT, environment

HELP = """
import sys
from smopd.__main__ import main
try:
    status = main(sys.argv[1:])
except SystemExit as end:
    status = end.code
print("loaded", *({"torch", "transformers"} & sys.modules.keys()))
sys.exit(status)
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment(), capture_output=True, text=True
    )


def test_the_list_and_the_version(capsys):
    for argv in ([], ["--help"]):
        assert main(argv) == 0
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert all([name, *about.split()] in lines for name, (_, about) in COMMANDS.items())
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"smopd {smopd.__version__}\n"


@pytest.mark.parametrize(("wrong", "near"), [("tain", "train"), ("evalute", "evaluate"), ("--list", None)])
def test_a_wrong_name_is_answered(wrong, near, capsys):
    assert main([wrong, "--help"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: '{wrong}' is no command") and error.count("\n") == 1
    assert (f"did you mean {near}?" in error) is (near is not None)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_commands_help_needs_no_torch(name):
    done = run("-c", HELP, name, "--help")
    assert done.returncode == 0, done.stderr
    *shown, loaded = done.stdout.splitlines()
    assert shown and loaded == "loaded"
    assert import_module(COMMANDS[name][0]).main.__defaults__ == (None,), "the console script gives no argv"


@pytest.mark.parametrize("name", COMMANDS)
def test_without_the_extra_a_command_says_what_to_install(name):
    done = run("-S", "-m", "smopd", name)  # -S: a Python without any installed package
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    named = re.search(r"not installed: (.*?);", line)
    assert named and named[1].split(", ") == TRAIN
    assert "pip install 'smopd[train]'" in line


def test_a_commands_mistakes_and_exit_status_are_its_own():
    done = run("-m", "smopd", "train", "quickstrat")
    assert done.returncode == 2 and "did you mean quickstart?" in done.stderr, done.stderr
