"""The commands under one name: help without torch, and what to install without the extra."""

import re
from importlib import import_module

import pytest

import smopd
from smopd.__main__ import COMMANDS, main
from smopd.extra import TRAIN
from tests.ranks import python

EACH = """
import contextlib, io, sys
from smopd.__main__ import COMMANDS, main
for name in COMMANDS:
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            status = main([name, "--help"])
    except SystemExit as end:
        status = end.code
    heavy = {"torch", "transformers"} & sys.modules.keys()
    print(name, status, len(said.getvalue()) > 100, *heavy, sep="|")
"""


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
    assert error.startswith(f"error: no command '{wrong}'") and error.count("\n") == 1
    assert (f"did you mean {near}?" in error) is (near is not None)


def test_a_commands_help_needs_no_torch():
    done = python("-c", EACH)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{name}|0|True" for name in COMMANDS]
    mains = [import_module(module).main for module, _ in COMMANDS.values()]
    assert {main.__defaults__ for main in mains} == {(None,)}, "the console script gives no argv"


def test_without_the_extra_a_command_names_what_to_install():
    done = python("-S", "-c", EACH)  # -S: a Python without any installed package
    for name, line in zip(COMMANDS, done.stdout.splitlines(), strict=True):
        expected = rf"{name}\|error: not installed: (.*?); .* pip install 'smopd\[train\]'.*\|False"
        absent = re.fullmatch(expected, line)
        assert absent and absent[1].split(", ") == TRAIN, line


def test_a_commands_mistakes_and_exit_status_are_its_own():
    done = python("-m", "smopd", "train", "quickstrat")
    assert done.returncode == 2 and "did you mean quickstart?" in done.stderr, done.stderr
