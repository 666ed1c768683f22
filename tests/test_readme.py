"""The README's recipe is one that the command takes, and the operations that it imports are there."""

from __future__ import annotations

import re
from pathlib import Path

from smopd import ops
from smopd.cli import parse

README = (Path(__file__).parents[1] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_recipe_parses(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("prompts.jsonl", "held_out.parquet"):
        Path(name).touch()
    (recipe,) = blocks("yaml")
    Path("mine.yaml").write_text(recipe)
    command = parse(["mine.yaml", "--opd.kappa", "32", "--dry-run"])
    assert command.settings.opd.kappa == 32
    assert command.dry_run


def test_the_operations_are_public():
    (line,) = re.findall(r"^from smopd\.ops import (.*)$", README, re.MULTILINE)
    assert {name.strip() for name in line.split(",")} <= set(ops.__all__)


def test_the_table_is_there():
    assert re.search(r"^\| SMOPD as we would run it \|", README, re.MULTILINE)
