"""The planner: states, frozen models, engines, and the exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examples.plan import Need, Options, main, plan, totals
from smopd.config.cli import read_settings
from smopd.config.settings import merged
from smopd.engine.vllm.memory import GIB, WORK
from tests.smopd.recipes import write_recipe

CONFIG = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size"
QWEN = {  # published values of CONFIG for Qwen2.5, whether the head is tied, and the parameters
    "1.5B": ((1536, 8960, 28, 12, 2, 151_936), True, 1_543_714_304),
    "7B": ((3584, 18_944, 28, 28, 4, 152_064), False, 7_615_616_512),
}
SMALL = QWEN["1.5B"][2]
POSITION = 2 * 28 * 2 * 128 * 2  # bytes of 1.5B's keys and values in bf16
LORA = {"student": {"lora": {"rank": 32, "alpha": 64}}}
LORA_TEACHERS = {"runs": {name: {"set": LORA} for name in ("accuracy_teacher", "format_teacher")}}
KL_REF = {"kl_ref": {"coef": 0.1}}
VLLM = {"rollout": {"engine": "vllm"}, "teachers": {"engine": "vllm", "dtype": "bfloat16"}}
NARROW = {"student": {"compute_dtype": "bfloat16", "gradient_checkpointing": True}}


def config_folder(folder: Path, name: str) -> str:
    """Write a folder with only a config.json."""
    place = folder / f"qwen{name}"
    place.mkdir(exist_ok=True)
    sizes = dict(zip(CONFIG.split(), QWEN[name][0], strict=True))
    config = {"model_type": "qwen2", "dtype": "bfloat16", "tie_word_embeddings": QWEN[name][1], **sizes}
    (place / "config.json").write_text(json.dumps(config))
    return str(place)


def recipe(folder: Path, model: str, *changes: dict[str, Any]) -> str:
    values = {
        "data": {"max_prompt_tokens": 1024},
        "rollout": {"max_new_tokens": 1024, "dtype": "bfloat16"},
        "loop": {"prompts_per_step": 64, "updates_per_step": 1},
    }
    for change in changes:
        values = merged(values, change)
    path = write_recipe(folder, values, ("model",))
    path.write_text(path.read_text() + f"model: {{path: {config_folder(folder, model)}}}\n")
    return str(path)


def planned(recipe: str, **given: Any) -> dict[str, list[Need]]:
    return plan(Options(), read_settings(recipe, {name: [str(value)] for name, value in given.items()}))


def held(needs: list[Need], what: str, column: str) -> int:
    return sum(need.bytes.get(column, 0) for need in needs if need.what.endswith(what))


def test_states_are_exact_and_shared_by_the_shards(tmp_path: Path) -> None:
    run = planned(recipe(tmp_path, "1.5B", NARROW), **{"student.shard_size": 4})["student"]
    assert held(run, "master weights, fp32", "rollout") == held(run, "gradients, fp32", "update") == SMALL
    assert held(run, "AdamW, fp32", "update") == 2 * SMALL
    assert totals(run)["update"] == sum(need.bytes.get("update", 0) for need in run)


@pytest.mark.parametrize(
    ("changes", "models"),
    [
        ({}, 2),
        (LORA_TEACHERS, 1),
        (merged(LORA_TEACHERS, KL_REF), 1),
        (KL_REF, 3),
        (merged(KL_REF, {"runs": {"student": {"set": LORA}}}), 2),
    ],
    ids=["full", "lora", "lora-and-reference", "reference", "under-the-student"],
)
def test_frozen_models_are_counted_as_they_are_held(
    changes: dict[str, Any], models: int, tmp_path: Path
) -> None:
    """LoRA teachers share one base. A reference is counted unless another model is the same."""
    run = planned(recipe(tmp_path, "1.5B", changes))["student"]
    assert held(run, "teachers' weights", "teachers") == 4 * models * SMALL


def test_sampling_ahead_and_update_hold_their_memory_together(tmp_path: Path) -> None:
    path = recipe(tmp_path, "1.5B")
    alone = planned(path)["student"]
    beside = planned(path, **{"loop.async_level": 1, "loss.old_logps": "rollout"})["student"]
    cache = sum(held(beside, what, "rollout") for what in ("KV cache", "sampling"))
    assert cache > 0
    assert totals(beside)["update"] == totals(alone)["update"] + cache


def test_engines_are_planned_as_they_are_made(tmp_path: Path) -> None:
    """The rollout engine takes a quarter; teachers' engines stay awake, or take turns in processes."""
    path = recipe(tmp_path, "1.5B", VLLM, NARROW)
    run = planned(path)["student"]
    free = 77 * GIB - SMALL // 2 - 2 * SMALL - WORK
    assert held(run, "rollout KV cache", "rollout") == pytest.approx(free / 4, abs=2)
    assert held(run, "rollout KV cache", "update") == 0
    cache = 2 * (16_384 + 2048 + 16) * POSITION
    for column in ("rollout", "update"):
        assert held(run, "KV cache", column) - held(run, "rollout KV cache", column) == cache
    run = planned(path, **{"teachers.vllm.engine_kwargs.kv_cache_memory_bytes": GIB})["student"]
    assert held(run, "KV cache", "update") == 2 * GIB
    run = planned(path, **{"teachers.vllm.placement": "process"})["student"]
    one = 2 * SMALL + cache // 2 + WORK
    assert (held(run, "in turn", "teachers"), held(run, "in turn", "update")) == (one, 0)


def test_the_verdict_is_in_plain_text_and_in_the_exit_status(tmp_path: Path, capsys) -> None:
    assert main([recipe(tmp_path, "7B"), "--gpus", "1"]) == 1
    out = capsys.readouterr().out
    assert out.isascii() and "\x1b" not in out
    for text in ("AdamW, fp32", "usable: 77.00 GiB per GPU", "run student: ", "does not fit, by"):
        assert text in out
    assert main(["quickstart", "--only", "smopd", "--gpus", "2", "--gpu-memory", "8"]) == 0
    out = capsys.readouterr().out
    assert "run smopd: " in out and "run gdpo" not in out, "a model that a factory makes"
