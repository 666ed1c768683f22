"""The command with real vLLM for rollouts and teachers, and LoRA runs whose adapters teach."""

from __future__ import annotations

import math

import pytest

from smopd.small_models import world_model
from tests.smopd.recipes import metric_lines, train, write_recipe

pytest.importorskip("vllm")
pytest.importorskip("peft")

LORA = {"rank": 8, "alpha": 16.0}


def test_vllm_samples_scores_and_takes_new_weights(tmp_path):
    model, tokenizer = world_model(0)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    changes = {
        "model": {"factory": None, "path": str(tmp_path / "model")},
        "rollout": {"engine": "vllm"},
        "teachers": {"engine": "vllm"},
        "student": {"lora": LORA},
        "loop": {"steps": 2},
        "runs": {"student": {"stage": "merge", "set": {"student": {"lora": None}}}},
    }
    result = train(write_recipe(tmp_path, changes, drop=("warm_start",)), "--output", "run")
    assert result.returncode == 0, result.stderr
    for run in ("accuracy_teacher", "format_teacher", "student"):
        for line in metric_lines(tmp_path / "run" / run):
            assert line["rollout_mismatch"] < 1e-3, (run, line["step"])
            assert all(math.isfinite(value) for value in line.values() if isinstance(value, float))
    for line in metric_lines(tmp_path / "run/student"):
        assert 0 < line["teacher_0/top_kappa_mass"] <= 1 + 1e-4
        assert 0 < line["teacher_1/top_kappa_mass"] <= 1 + 1e-4
    assert (tmp_path / "run/format_teacher/export/adapter/adapter_config.json").is_file()
    assert not (tmp_path / "run/student/export/adapter").exists()
