"""README and docs: commands parse, the README's operations run, its rewards score, and the site builds."""

import functools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tyro

from smopd import evaluate, export, merge, ops, push
from smopd.config.cli import parse
from smopd.config.errors import is_setting, schemas
from smopd.data.places import catalogue
from tests.ranks import ROOT, python

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"(?:smopd |(?:torchrun|python) .*-m smopd\.)(\w+)(.*)")


def commands() -> Iterator[tuple[str, str, list[str]]]:
    """Yield page, command and words of every command of ours in a block."""
    for page in PAGES:
        blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
        shell = "".join(block for language, block in blocks if language in ("", "bash", "sh"))
        for match in map(COMMAND.match, shell.replace("\\\n", " ").splitlines()):
            if match:
                text = re.sub(r"(--\S+) …", r"\1 M", re.split(r" && | > ", match[2])[0])
                yield page.name, match[1], shlex.split(text.replace("…", ""), comments=True)


def test_every_command_parses(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("prompts.jsonl", "held_out.parquet"):
        Path(name).touch()
    for folder in ("bench", "examples"):
        Path(folder).symlink_to(ROOT / folder)
    Path("mine.yaml").write_text(re.findall(r"```yaml\n(.*?)```", PAGES[0].read_text(), re.DOTALL)[0])
    called = {"merge": merge.merge, "export": export.export_checkpoint, "push": push.push}
    options = {name: functools.wraps(each)(lambda *_, **__: None) for name, each in called.items()}
    found = list(commands())
    assert {"train", "evaluate", "merge", "data"} <= {command for _, command, _ in found}
    for page, command, words in found:
        words = ["quickstart" if word == "$recipe" else word for word in words]
        try:
            if command == "train":
                parse(words)
            elif command == "evaluate":
                if ":" not in words[0]:  # a suite of the user's: see tests/test_extending.py
                    model = [] if {"--model", "--responses"} & {*words} else ["--model", "M"]
                    tyro.extras.subcommand_cli_from_dict(evaluate.SUITES, args=[*words, *model])
            elif command == "data":
                assert {*words[1:]} <= {*catalogue()}
            else:
                tyro.cli(options[command], args=words, config=(tyro.conf.FlagCreatePairsOff,))
        except SystemExit as end:
            pytest.fail(f"{page}: smopd {command} {shlex.join(words)}: {end}")


def test_the_targets_of_make_that_pages_name_exist():
    makefile, contributing = ((ROOT / name).read_text() for name in ("Makefile", "CONTRIBUTING.md"))
    pages = "\n".join([*(page.read_text() for page in PAGES), contributing])
    named = {*re.findall(r"^make ([a-z-]+)  |`make ([a-z-]+)`", pages, re.MULTILINE)}
    (phony,) = re.findall(r"^\.PHONY: (.*)", makefile, re.MULTILINE)
    assert {"install", "test-verl"} <= {first or second for first, second in named} <= {*phony.split()}


def test_the_operations_run_and_the_rewards_score():
    rewards, operations = re.findall(r"```python\n(.*?)```", PAGES[0].read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(operations, names)
    assert names["loss"].isfinite() and names["hidden_ND"].grad.abs().sum() > 0
    exec(rewards, names)
    assert names["format"](["q"], ["<think>so"], answer=["7"]) == [1.0]
    assert names["accuracy"](["q", "q"], ["it is 7", "it is 8"], answer=["7", "7"]) == [3.0, -3.0]


def test_the_sites_sources_have_every_setting_and_operation_and_only_links_that_lead_somewhere():
    done = python("docs/site.py")
    assert done.returncode == 0, done.stderr
    reference = ROOT / "build/docs/reference"
    settings = (reference / "settings.md").read_text()
    assert all(f"`{'.'.join(keys)}`" in settings for keys in schemas() if keys and is_setting(keys))
    assert "| `text|null` |" in settings  # Python-Markdown would show a backslash
    operations = (reference / "operations.md").read_text()
    assert all(f"{name}(\n" in operations for name in ops.__all__ if name[0].islower())
