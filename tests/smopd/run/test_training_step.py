"""bench/training_step.yaml: what it says of itself, and all of it at tiny sizes."""

from __future__ import annotations

import json
import math

import pytest
import torch

from smopd.config.cli import read_settings
from smopd.worlds.models import QWEN_VOCAB_SIZE
from tests.patience import HANG_SECONDS
from tests.smopd.recipes import ROOT, metric_lines, train_here

RECIPE = ROOT / "bench" / "training_step.yaml"
TINY = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "layers": 1,
    "heads": 2,
    "kv_heads": 1,
    "max_positions": 256,
    "vocab_size": 600,
}


def test_its_sizes_are_those_of_the_description() -> None:
    settings = read_settings(str(RECIPE))
    student = settings.resolved("student")
    assert (student.loop.prompts_per_step, student.rollout.group_size) == (64, 8)
    assert student.rollout.max_new_tokens == 512 and student.loop.steps > 1
    assert len(student.teachers.models) == 2
    sizes = settings.model.kwargs
    assert sizes["vocab_size"] == QWEN_VOCAB_SIZE
    width, inner = sizes["hidden_size"], sizes["intermediate_size"]
    kv_width = width // sizes["heads"] * sizes["kv_heads"]
    biases = width + 2 * kv_width  # of queries, keys and values
    attention = 2 * width * width + 2 * width * kv_width + biases
    layer = attention + 3 * width * inner + 2 * width
    assert QWEN_VOCAB_SIZE * width + sizes["layers"] * layer + width == 494_032_768
    longest = settings.data.max_prompt_tokens + student.rollout.max_new_tokens
    assert 64 * 8 * longest <= student.rollout.max_batch_tokens and longest <= sizes["max_positions"]


@pytest.mark.slow
@pytest.mark.usefixtures("poisoned_memory")
def test_it_runs_at_tiny_sizes(tmp_path) -> None:
    """In bf16, with padded rows of logits: no update is skipped for memory that was never written."""
    assert read_settings(str(RECIPE)).resolved("student").student.compute_dtype == "bfloat16"
    done = train_here(
        RECIPE,
        *("--output", str(tmp_path / "out")),
        *("--model.kwargs", json.dumps(TINY)),
        *("--loop.steps", "2"),
        *("--loop.prompts_per_step", "2"),
        *("--rollout.max_new_tokens", "12"),
        *("--scoring.startup_seconds", str(HANG_SECONDS)),
        *("--scoring.deadline_seconds", str(HANG_SECONDS)),
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = metric_lines(tmp_path / "out" / "student", times=True)
    assert len(lines) == 2
    for line in lines:
        assert {"seconds/rollout", "seconds/teachers", "seconds/update", "seconds/sync"} <= set(line)
        assert math.isfinite(line["kl"]) and line["grad_norm"] > 0
        assert ("memory/peak_gib" in line) == torch.cuda.is_available()


@pytest.mark.parametrize("name", ["length", "vowels"])
def test_its_rewards_are_in_their_ranges(name: str) -> None:
    from bench.harness import rewards

    (reward,) = [reward for reward in read_settings(str(RECIPE)).rewards if reward.name == name]
    low, high = reward.range
    values = getattr(rewards, name)(["p"] * 4, ["", "a", "xyz", "ae" * 99])
    assert all(low <= value <= high for value in values) and len(set(values)) > 1
