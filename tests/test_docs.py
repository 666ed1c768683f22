"""README and docs: commands parse, and what two pages repeat is the same."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import tyro

from smopd import evaluate, export, merge, push
from smopd.config.cli import parse
from smopd.data.places import catalogue
from tests.ranks import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"(?:smopd |(?:torchrun|python) .*-m smopd\.)(\w+)(.*)")
TABLES = {1: "benchmarks.md", 2: "benchmarks.md"}
"""README's tables, and the page that has each one's numbers. The first is made from results (tests/bench)."""


def commands() -> Iterator[tuple[str, str, list[str]]]:
    """Yield page, command and words of every command of ours in a block."""
    for page in PAGES:
        for language, block in re.findall(
            r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE
        ):
            if language not in ("", "bash", "sh"):
                continue
            for line in block.replace("\\\n", " ").splitlines():
                if match := COMMAND.match(line):
                    words = shlex.split(re.split(r" && | > ", match[2])[0], comments=True)
                    before = ["", *words]
                    yield (
                        page.name,
                        match[1],
                        [
                            "M" if word == "…" else word
                            for word, last in zip(words, before, strict=False)
                            if word != "…" or last.startswith("--")
                        ],
                    )


def test_every_command_parses(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("prompts.jsonl", "held_out.parquet"):
        Path(name).touch()
    for folder in ("bench", "examples"):
        Path(folder).symlink_to(ROOT / folder)
    Path("mine.yaml").write_text(re.findall(r"```yaml\n(.*?)```", PAGES[0].read_text(), re.DOTALL)[0])
    only_parsed = functools.wraps(merge.merge)(lambda *args, **kwargs: None)
    options = {"merge": only_parsed, "export": export.Options, "push": push.Options}
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


def tables(page: Path) -> list[list[list[str]]]:
    """Return the cells of every row of every table."""
    found = re.findall(r"(?:^\|.*\n)+", page.read_text(), re.M)
    return [
        [[cell.strip() for cell in row.strip("|").split("|")] for row in rows.splitlines()] for rows in found
    ]


def numbers(text: str) -> list[str]:
    return re.findall(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?![\w.]*[a-zA-Z])", text)


def value(number: str) -> float:
    return float(number.replace(",", ""))


@pytest.mark.parametrize(("table", "page"), TABLES.items())
def test_the_readmes_numbers_are_those_of_the_page(table: int, page: str) -> None:
    there = [row for rows in tables(ROOT / "docs" / page) for row in rows]
    for label, *cells in tables(PAGES[0])[table][2:]:
        same = [row for row in there if row[0] in (label, label.split(",")[0])]
        known = [value(number) for row in same or there for cell in row[1:] for number in numbers(cell)]
        for cell in cells:
            shown = numbers(cell)
            if cell.count(", ") == len(shown) - 1 > 0:  # by seed; the page has the mean
                shown = [f"{sum(map(value, shown)) / len(shown):.1f}"]
            for number in shown:
                half = 0.501 * 10.0 ** -len(number.partition(".")[2])
                close = [each for each in known if abs(each - value(number)) <= half]
                assert close, f"{label}: {number} is not on {page}"
