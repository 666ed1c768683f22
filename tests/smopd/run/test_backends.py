"""The trainer on the reference and on the C++ kernels: the same run, within rounding."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from smopd.kernels.dispatch import cpp_unavailable
from smopd.worlds.models import world_model
from tests.smopd.recipes import metric_lines, train, write_recipe

pytestmark = pytest.mark.slow

REWARDS = """
def brevity(prompts, completions, **columns):
    return [1 / (1 + len(text)) for text in completions]

def variety(prompts, completions, **columns):
    return [float(len(set(text))) for text in completions]
"""


@pytest.mark.skipif(cpp_unavailable() is not None, reason="smopd._C is not built")
def test_reference_and_cpp_train_alike(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    models = []
    for seed in range(3):
        model, tokenizer = world_model(seed)
        # far apart: of two candidates nearer than rounding, each backend may keep another
        model.lm_head.weight.data.mul_(8.0)
        models.append(str(tmp_path / f"model_{seed}"))
        model.save_pretrained(models[-1])
        tokenizer.save_pretrained(models[-1])
    names = ("brevity", "variety")
    changes = {
        "model": {"factory": None, "path": models[0]},
        "rewards": [{"name": name, "function": f"my_rewards:{name}"} for name in names],
        "teachers": {"models": [{"model": m, "reward": r} for m, r in zip(models[1:], names, strict=True)]},
        # eps: at AdamW's default a weight without a gradient moves by the sign of its rounding error
        "student": {"adam_eps": 1e-2},
        "loop": {"steps": 3},
    }
    recipe = write_recipe(tmp_path, changes, drop=("warm_start", "runs"))
    recipe.write_text(recipe.read_text() + "runs: {student: {stage: merge}}\n")
    for backend in ("reference", "cpp"):
        if backend == "reference":
            monkeypatch.setenv("SMOPD_BACKEND", backend)
        else:
            monkeypatch.delenv("SMOPD_BACKEND")
        result = train(recipe, "--output", backend)
        assert result.returncode == 0, result.stderr
        assert f"served by the {backend} backend" in result.stdout + result.stderr

    theirs, ours = (tmp_path / backend / "student" for backend in ("reference", "cpp"))
    assert (ours / "samples.jsonl").read_text() == (theirs / "samples.jsonl").read_text()
    for mine, other in zip(metric_lines(ours), metric_lines(theirs), strict=True):
        assert mine == pytest.approx(other, rel=1e-4, abs=1e-6)
    begun, weights, others = (
        load_file(f"{folder}/model.safetensors") for folder in (models[0], ours / "export", theirs / "export")
    )
    moved = torch.cat([(weights[name] - begun[name]).flatten() for name in begun]).norm()
    apart = torch.cat([(weights[name] - others[name]).flatten() for name in begun]).norm()
    assert moved > 0
    assert apart < 1e-5 * moved
