"""The README's recipe is one that the command takes; operations and links that the pages name are there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from smopd import ops
from smopd.config.cli import parse

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


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
    named = [
        name.strip()
        for page in PAGES
        for line in re.findall(r"^from smopd\.ops import (.*)$", page.read_text(), re.MULTILINE)
        for name in line.split(",")
    ]
    named += re.findall(r"smopd\.ops\.(\w+)", (ROOT / "docs" / "method.md").read_text())
    assert len(named) > 10
    assert set(named) <= set(ops.__all__)


def test_the_operations_run_and_the_rewards_score():
    rewards, operations = blocks("python")
    names: dict[str, Any] = {}
    exec(operations, names)
    assert names["loss"].isfinite() and names["hidden_ND"].grad.abs().sum() > 0
    exec(rewards, names)
    assert names["format"](["q"], ["<think>so"], answer=["7"]) == [1.0]
    assert names["accuracy"](["q", "q"], ["it is 7", "it is 8"], answer=["7", "7"]) == [3.0, -3.0]


def test_the_files_that_the_pages_name_are_there():
    wrong = []
    for page in PAGES:
        text = page.read_text()
        links = re.findall(r"\]\((?!http)([^)#]+)\)", text)
        paths = re.findall(r"`((?:kernels|engine|smopd|tests|bench|csrc|examples|docs)/[\w/.]+\.\w+)`", text)
        wrong += [f"{page.name}: {link}" for link in links if not (page.parent / link).exists()]
        wrong += [f"{page.name}: {path}" for path in paths if not (ROOT / path).exists()]
    assert not wrong, wrong
