"""The commands under one name: each says its own help, without torch, and a wrong name is answered."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib import import_module

import pytest

from smopd.__main__ import COMMANDS, main
from tests.smopd.recipes import ROOT, environment

HELP = """
import sys
from smopd.__main__ import main
try:
    status = main(sys.argv[1:])
except SystemExit as end:
    status = end.code
print("loaded", *({"torch", "transformers", "smopd.train"} & sys.modules.keys()))
sys.exit(status)
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment(), capture_output=True, text=True
    )


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_the_list_of_commands(argv, capsys):
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, (_, about) in COMMANDS.items():
        assert [name, *about.split()] in [line.split() for line in lines]


def test_the_list_loads_no_command():
    done = run("-c", HELP, "--help")
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "loaded"


@pytest.mark.parametrize(("wrong", "near"), [("tain", "train"), ("evalute", "evaluate"), ("--list", None)])
def test_a_wrong_name_is_answered(wrong, near, capsys):
    assert main([wrong, "--help"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: '{wrong}' is no command") and error.count("\n") == 1
    assert (f"did you mean {near}?" in error) is (near is not None)


@pytest.mark.parametrize("name", [*COMMANDS])
def test_a_commands_help_is_its_own_and_needs_no_torch(name):
    own = run("-m", COMMANDS[name][0].removesuffix(".__main__"), "--help")
    done = run("-c", HELP, name, "--help")
    assert (own.returncode, done.returncode) == (0, 0), own.stderr + done.stderr
    *shown, loaded = done.stdout.splitlines()
    assert shown and shown == own.stdout.splitlines()
    assert set(loaded.split()) <= {"loaded", "smopd.train"}


def test_a_commands_mistakes_and_exit_status_are_its_own():
    done = run("-m", "smopd", "train", "quickstrat")
    assert done.returncode == 2 and "did you mean quickstart?" in done.stderr, done.stderr


@pytest.mark.parametrize("name", [*COMMANDS])
def test_commands_are_called_alike(name):
    signature = inspect.signature(import_module(COMMANDS[name][0]).main)
    assert list(signature.parameters) == ["argv"] and signature.parameters["argv"].default is None
    assert signature.return_annotation in ("int", "int | None")
