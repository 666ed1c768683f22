"""The README's recipe is valid, its operations run, and its rewards score."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from smopd.config.cli import parse

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


def test_the_operations_run_and_the_rewards_score():
    rewards, operations = blocks("python")
    names: dict[str, Any] = {}
    exec(operations, names)
    assert names["loss"].isfinite() and names["hidden_ND"].grad.abs().sum() > 0
    exec(rewards, names)
    assert names["format"](["q"], ["<think>so"], answer=["7"]) == [1.0]
    assert names["accuracy"](["q", "q"], ["it is 7", "it is 8"], answer=["7", "7"]) == [3.0, -3.0]
