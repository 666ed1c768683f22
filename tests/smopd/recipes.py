"""A recipe that runs both stages in seconds, small models, and JSON lines, for tests of the commands."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from contextlib import redirect_stderr, redirect_stdout
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from smopd import evaluate
from smopd.config.cli import parse
from smopd.config.settings import merged
from smopd.worlds.models import world_model
from tests.ranks import ROOT, on_ranks

Done = subprocess.CompletedProcess[str]
WORLD = "smopd.worlds.toy_world:prompts"
TINY: dict[str, Any] = {
    "name": "tiny",
    "model": {"factory": "smopd.worlds.models:world_model", "kwargs": {"layers": 1}},
    "data": {
        "train": {"source": WORLD, "kwargs": {"n": 40, "seed": 1}},
        "evaluation": {"source": WORLD, "kwargs": {"n": 4, "seed": 2, "split": "heldout"}},
        "max_prompt_tokens": 96,
    },
    "rewards": [
        {"name": "accuracy", "function": "smopd.rewards.rlla:accuracy_reward", "range": [-3, 3]},
        {"name": "format", "function": "smopd.rewards.rlla:format_reward", "range": [0, 1]},
    ],
    "warm_start": {
        "source": {"source": "smopd.worlds.toy_world:demonstrations", "kwargs": {"n": 200, "seed": 3}},
        "steps": 6,
        "batch_size": 16,
        "learning_rate": 5.0e-3,
    },
    "rollout": {"group_size": 4, "max_new_tokens": 16},
    "student": {"learning_rate": 1.0e-3, "compute_dtype": "float32"},
    "scoring": {"deadline_seconds": 600.0},
    "loop": {"steps": 4, "prompts_per_step": 4, "updates_per_step": 2},
    "teachers": {"models": [{"model": f"{name}_teacher", "reward": name} for name in ("accuracy", "format")]},
    "merge": {"method": "published"},
    "opd": {"target": "merged", "tail": True},
    "checkpoint": {"every": 2, "keep": 1},
    "runs": {
        "accuracy_teacher": {"stage": "specialize", "reward_weights": [0.9, 0.1]},
        "format_teacher": {"stage": "specialize", "reward_weights": [0.1, 0.9]},
        "student": {"stage": "merge"},
    },
}


def write_recipe(folder: Path, changes: dict[str, Any] | None = None, drop: tuple[str, ...] = ()) -> Path:
    """Write `TINY` without the top-level keys `drop`, with `changes`, to a file in `folder`."""
    kept = {key: value for key, value in TINY.items() if key not in drop}
    values = merged(deepcopy(kept), changes or {})
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path


def train(recipe: Path | str, *arguments: str, ranks: int = 1, cwd: Path | None = None) -> Done:
    """Run the command in a process of its own, or in `ranks`."""
    return on_ranks(ranks, "-m", "smopd.train", str(recipe), *arguments, cwd=cwd or Path(recipe).parent)


def train_here(recipe: Path | str, *arguments: str, cwd: Path | None = None) -> Done:
    """Run the command in this process, which has already imported torch.

    The log is pytest's; an exception that the command lets go is the test's.
    """
    from smopd.run.pipeline import run_recipe

    place = cwd or Path(recipe).parent
    before, modules = Path.cwd(), set(sys.modules)
    out, err = io.StringIO(), io.StringIO()
    os.chdir(place)
    sys.path.insert(0, str(place))
    try:
        with redirect_stdout(out), redirect_stderr(err):
            status = run_recipe(parse([str(recipe), *arguments]))
    finally:
        os.chdir(before)
        sys.path.remove(str(place))
        for name in set(sys.modules) - modules:  # the next test may have others
            file = str(getattr(sys.modules[name], "__file__", ""))
            if place != ROOT and file.startswith(f"{place}{os.sep}"):
                del sys.modules[name]
    return Done([str(recipe), *arguments], status, out.getvalue(), err.getvalue())


def json_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def metric_lines(folder: Path, *, times: bool = False) -> list[dict[str, Any]]:
    """Return the metrics of a run, without times and memory."""
    varies = ("seconds/", "seconds_overlapped/", "tokens_per_second", "memory/")
    lines = json_lines(folder / "metrics.jsonl")
    return [{k: v for k, v in line.items() if times or not k.startswith(varies)} for line in lines]


def save_world(folder: Path, seed: int = 0, **options: Any) -> str:
    """Save a random model of the quickstart's world, with its tokenizer."""
    for part in world_model(seed, **options):
        part.save_pretrained(folder)
    return str(folder)


def evaluated(suite: str, output: Path, *words: object) -> tuple[dict[str, Any], list[Any]]:
    """Run `smopd evaluate` and return what it wrote: the summary and the items."""
    evaluate.main([suite, "--output", *map(str, (output, *words))])
    return json.loads((output / f"{suite}.json").read_text()), json_lines(output / f"{suite}_items.jsonl")
