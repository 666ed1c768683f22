"""`smopd train` and `smopd evaluate` with vLLM, LoRA teachers, and DeepSpeed."""

import math

import pytest

from tests.smopd.recipes import (
    evaluated,
    metric_lines,
    save_world,
    train,
    train_here,
    write_lines,
    write_recipe,
)
from tests.smopd.run.test_multi_turn import MODULE, save_model

pytest.importorskip("vllm")
pytest.importorskip("peft")
from tests.engine.vllm.served import fork_engines

LORA = {"rank": 8, "alpha": 16.0}


def test_vllm_samples_scores_and_takes_new_weights(tmp_path):
    """The student's rollouts are conversations: log-probabilities are the trainer's in every turn."""
    (tmp_path / "spoken.py").write_text(MODULE)
    changes = {
        "model": {"factory": None, "path": save_model(tmp_path / "model", 0)},
        "rollout": {"engine": "vllm"},
        "teachers": {"engine": "vllm"},
        "student": {"lora": LORA},
        "loop": {"steps": 2},
        "runs": {
            "student": {
                "stage": "merge",
                "set": {
                    "student": {"lora": None, "learning_rate": 1e-2},
                    "loop": {"steps": 3, "async_level": 1},
                    "loss": {"importance_cap": 2.0},
                    "rollout": {"environment": "spoken:Numbers", "turns": 3, "max_new_tokens": 12},
                },
            }
        },
    }
    result = train(write_recipe(tmp_path, changes, drop=("warm_start",)), "--output", "run")
    assert result.returncode == 0, result.stderr
    for run in ("accuracy_teacher", "format_teacher", "student"):
        for line in metric_lines(tmp_path / "run" / run):
            late = run == "student" and line["step"] > 1  # sampled by the previous policy
            assert (line["rollout_mismatch"] < 1e-3) is not late, (run, line["step"])
            assert all(math.isfinite(value) for value in line.values() if isinstance(value, float))
    for line in metric_lines(tmp_path / "run/student"):
        assert line["conversation/turns"] > 1 and line["conversation/environment_tokens"] > 0
        assert all(0 < line[f"teacher_{m}/top_kappa_mass"] <= 1 + 1e-4 for m in (0, 1))
    assert (tmp_path / "run/format_teacher/export/adapter/adapter_config.json").is_file()
    assert not (tmp_path / "run/student/export/adapter").exists()


def test_lora_runs_and_teachers_share_one_engine_with_their_base(tmp_path):
    """kl_ref of a LoRA run uses its own base; with full weights it uses the teachers' base."""
    changes = {
        "model": {"factory": None, "path": save_world(tmp_path / "model")},
        "data": {"evaluation": None},
        "teachers": {"engine": "vllm"},
        "kl_ref": {"coef": 0.01},
        "merge": {"method": "published"},
        "opd": {"kappa": 8},
        "student": {"lora": LORA, "learning_rate": 1e-2},
        "loss": {"entropy_coef": 0.1},  # a gradient if no reward differs
        "loop": {"steps": 2},
        "runs": {"student": {"stage": "merge", "set": {"student": {"lora": None}}}},
    }
    result = train(write_recipe(tmp_path, changes, drop=("warm_start",)), "--output", "run")
    assert result.returncode == 0, result.stderr
    made = [line for line in result.stderr.splitlines() if line.startswith("vLLM ")]
    assert len(made) == 1 and "teachers/0 engine for" in made[0], made
    for run in ("accuracy_teacher", "format_teacher", "student"):
        first, second = metric_lines(tmp_path / "run" / run)
        assert abs(first["kl_ref"]) < 1e-4 < abs(second["kl_ref"]), run


def test_an_evaluation_samples_the_same_with_both_engines(tmp_path):
    prompt = [{"role": "user", "content": "hi"}]
    truth = {"ground_truth": "<think> t </think>\n<response> r </response>"}
    data = write_lines(tmp_path / "items.jsonl", [{"prompt": prompt, "reward_model": truth}])
    words = ("--model", save_world(tmp_path / "model", max_positions=4096), "--data", data)
    fork_engines()
    local, vllm = (
        evaluated("rlla", tmp_path / engine, *words, "--max-new-tokens", "8", "--engine", engine)[1]
        for engine in ("local", "vllm")
    )
    assert local == vllm


@pytest.mark.slow
def test_deepspeed_on_two_ranks(tmp_path):
    pytest.importorskip("deepspeed")
    changes = {
        "loop": {"steps": 2},
        "data": {"evaluation": None},
        "checkpoint": {"every": 0},
        "loss": {"entropy_coef": 0.1},  # a gradient if no reward differs
    }
    recipe = write_recipe(tmp_path, changes, drop=("warm_start",))
    run = "accuracy_teacher"
    one = train_here(recipe, "--output", "one", "--only", run)
    two = train(recipe, "--output", "two", "--only", run, "--student.strategy", "deepspeed", ranks=2)
    assert one.returncode == two.returncode == 0, one.stderr + two.stderr
    lines = (metric_lines(tmp_path / output / run) for output in ("one", "two"))
    for alone, sharded in zip(*lines, strict=True):
        assert sharded["tokens"] == alone["tokens"]
        assert sharded["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-3), alone["step"]
