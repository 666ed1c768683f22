"""Runs that start from a weight merge: the guard's table and choice, an interruption, two ranks."""

import json
import shutil
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from smopd.merging.guard import Starter
from smopd.merging.vectors import Part, TaskVectors
from smopd.record.files import JsonlLog
from tests.smopd.recipes import metric_lines, train, train_here, write_recipe

MERGE: dict[str, Any] = {
    "models": [
        {"model": "accuracy_teacher", "reward": "accuracy", "keep": [1, 0.2]},
        {"model": "format_teacher", "reward": "format", "max_regression": 0.1},
    ],
    "guard": {"prompts": 6, "samples": 3},
}
REWARDS = """
def short(prompts, completions, **columns):
    return [-len(text) / 20 for text in completions]

def vowels(prompts, completions, **columns):
    return [sum(letter in "aeiou" for letter in text) / max(len(text), 1) for text in completions]
"""
TAUGHT: dict[str, Any] = {
    "model": {"kwargs": {"layers": 2}},
    "rewards": [
        {"name": "accuracy", "function": "two_rewards:short", "range": [-3, 3]},
        {"name": "format", "function": "two_rewards:vowels", "range": [0, 1]},
    ],
    "warm_start": {"steps": 30, "batch_size": 32, "source": {"kwargs": {"n": 400}}},
    "rollout": {"max_new_tokens": 24},
    "loop": {"steps": 6},
    "student": {"learning_rate": 1.0e-2},
    "scoring": {"special_tokens": False},  # a model of random weights says many
}
NAMES = [
    "base", "accuracy_teacher alone", "format_teacher alone", "plain sum",
    "accuracy_teacher (keep 0.2) + format_teacher",
]  # fmt: skip


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with the base and both teachers finished."""
    folder = tmp_path_factory.mktemp("taught")
    (folder / "two_rewards.py").write_text(REWARDS)
    done = train_here(
        write_recipe(folder, TAUGHT), "--output", "out", "--only", "accuracy_teacher", "format_teacher"
    )
    assert done.returncode == 0, done.stderr
    return folder / "out"


def placed(folder: Path, taught: Path, name: str = "out", **merge: Any) -> tuple[Path, Path]:
    """A recipe whose student starts from a merge, and a run directory with its teachers."""
    own = {"merge": {**deepcopy(MERGE), **merge, "method": "weights"}, "loop": {"steps": 1}}
    (folder / "two_rewards.py").write_text(REWARDS)
    recipe = write_recipe(folder, TAUGHT | {"runs": {"student": {"set": own}}})
    shutil.copytree(taught, folder / name)
    return recipe, folder / name


@pytest.fixture
def place(tmp_path: Path, taught: Path) -> Callable[..., tuple[Path, Path]]:
    return partial(placed, tmp_path, taught)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, taught: Path) -> tuple[Path, str]:
    """A run directory with a guarded start, and what the command said."""
    recipe, out = placed(tmp_path_factory.mktemp("guarded"), taught)
    done = train_here(recipe, "--output", "out")
    assert done.returncode == 0, done.stderr
    return out, done.stdout


def test_a_guarded_start_is_the_best_of_its_table(guarded: tuple[Path, str]) -> None:
    out, said = guarded
    table = json.loads((out / "student" / "merge.json").read_text())
    rows = {row["name"]: row for row in table["rows"]}
    assert list(rows) == NAMES[:4], "the full sum passes, so no trimmed one is tried"
    assert table["rollouts"] == 18
    assert len({tuple(row["rewards"].values()) for row in rows.values()}) == len(rows)
    assert table["chosen"] == "plain sum" and rows["plain sum"]["out"] is None
    assert f"student starts from {table['chosen']}" in said

    folders = [str(out / name / "export") for name in ("base", "accuracy_teacher", "format_teacher")]
    vectors = TaskVectors(folders[0], folders[1:])
    parts = [Part(**part) for part in rows[table["chosen"]]["parts"]]
    written = load_file(out / "student" / "start" / "model.safetensors")
    assert all(torch.equal(written[name], value) for name, value in vectors.merged(parts))

    views = [line["tokens"] for line in JsonlLog(out / "student" / "tokens.jsonl").read()]
    assert views and all(len(token["log_ratios"]) == 2 for tokens in views for token in tokens)
    assert "(this model)" in (out / "student/export/README.md").read_text()
    page = (out / "report.html").read_text()
    assert '"Total steps">13<' in page and "smopd train " in page
    assert f"{table['chosen']}: taken" in page and "18 rollouts of training prompts each" in page
    assert "base: lacks 100% of what format_teacher gained" in page


def test_a_stopped_guard_resumes(place, monkeypatch) -> None:
    strict = deepcopy(MERGE["models"])
    strict[0]["max_regression"] = 1  # no sum passes: both levels are tried, and the nearest is chosen
    recipe, whole = place("whole", models=strict)
    train_here(recipe, "--output", "whole")
    table = json.loads((whole / "student" / "merge.json").read_text())
    assert [row["name"] for row in table["rows"]] == NAMES and all(row["out"] for row in table["rows"])
    _, out = place("cut", models=strict)
    merges: list[str] = []
    merged, write = TaskVectors.merged, Starter._write

    def counted(self: TaskVectors, chosen: Any) -> Any:
        merges.append(str(chosen))
        return merged(self, chosen)

    def torn(self: Starter, **table: Any) -> None:
        if len(table["rows"]) == 3:
            raise KeyboardInterrupt
        write(self, **table)

    monkeypatch.setattr(TaskVectors, "merged", counted)
    monkeypatch.setattr(Starter, "_write", torn)
    with pytest.raises(KeyboardInterrupt):
        train_here(recipe, "--output", "cut")
    assert len(merges) == 3 and not (out / "student" / "start").exists()
    monkeypatch.setattr(Starter, "_write", write)
    merges.clear()
    assert train_here(recipe, "--output", "cut").returncode == 0
    assert len(merges) == 3 + 1  # the missing rows, and the start
    assert (out / "student" / "merge.json").read_text() == (whole / "student" / "merge.json").read_text()
    assert metric_lines(out / "student") == metric_lines(whole / "student")


@pytest.mark.slow
def test_two_ranks_share_the_rollouts_and_agree(place, guarded: tuple[Path, str]) -> None:
    one, (recipe, two) = guarded[0], place("two")
    done = train(recipe, "--output", "two", "--only", "student", ranks=2)
    assert done.returncode == 0, done.stderr
    tables = [json.loads((out / "student" / "merge.json").read_text()) for out in (one, two)]
    assert tables[0]["chosen"] == tables[1]["chosen"]
    for first, second in zip(*(table["rows"] for table in tables), strict=True):
        assert first["rewards"] == pytest.approx(second["rewards"], abs=1e-9), first["name"]
    assert done.stdout.count("student starts from") == 1
    for name, value in load_file(one / "student" / "start" / "model.safetensors").items():
        assert torch.equal(value, load_file(two / "student" / "start" / "model.safetensors")[name])


def test_a_start_without_a_guard_is_the_merge_as_given(place: Callable[..., tuple[Path, Path]]) -> None:
    models = [{"model": "accuracy_teacher", "keep": 0.3}, {"model": "format_teacher", "exclude": "mlp"}]
    recipe, out = place(models=models, guard=None)
    done = train_here(recipe, "--output", "out", "--only", "student")
    assert done.returncode == 0, done.stderr
    folders = [str(out / name / "export") for name in ("base", "accuracy_teacher", "format_teacher")]
    expected = TaskVectors(folders[0], folders[1:]).merged([Part(keep=0.3), Part(exclude="mlp")])
    written = load_file(out / "student" / "start" / "model.safetensors")
    assert all(torch.equal(written[name], value) for name, value in expected)
    assert not (out / "student" / "merge.json").exists()
    (out / "student" / "done.json").unlink()
    (out / "student" / "start" / "model.safetensors").write_bytes(b"other")
    done = train_here(recipe, "--output", "out", "--only", "student")
    assert done.returncode == 1 and "start/model.safetensors: SHA-256 is" in done.stderr, done.stderr
