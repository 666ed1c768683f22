"""bench/training_step.yaml: what it says of itself, and all of it at tiny sizes."""

from __future__ import annotations

import json
import math

import pytest
import torch

from smopd.config.cli import read_settings
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
