"""The planner: exact states, frozen models as they are held, engines as they are made, its verdict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from smopd.config.settings import merged
from smopd.engine.vllm.memory import GIB, WORK
from smopd.plan import _sizes, main
from tests.smopd.recipes import write_recipe

CONFIG = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "tie_word_embeddings",
)
QWEN = {  # Qwen2.5's numbers of CONFIG, and how many parameters they make: as published
    "1.5B": ((1536, 8960, 28, 12, 2, 151_936, True), 1_543_714_304),
    "7B": ((3584, 18_944, 28, 28, 4, 152_064, False), 7_615_616_512),
}
SMALL = QWEN["1.5B"][1]
POSITION = 2 * 28 * 2 * 128 * 2  # bytes of 1.5B's keys and values in bf16
LORA = {"student": {"lora": {"rank": 32, "alpha": 64}}}
LORA_TEACHERS = {"runs": {name: {"set": LORA} for name in ("accuracy_teacher", "format_teacher")}}
PRODUCT = {"runs": {"student": {"set": {"merge": {"method": "product"}}}}}
KL_REF = {"kl_ref": {"coef": 0.1}}
VLLM = {"rollout": {"engine": "vllm"}, "teachers": {"engine": "vllm", "dtype": "bfloat16"}}
NARROW = {"student": {"compute_dtype": "bfloat16", "gradient_checkpointing": True}}


def config_folder(folder: Path, name: str) -> str:
    """A folder with config.json and nothing else."""
    place = folder / f"qwen{name}"
    place.mkdir(exist_ok=True)
    sizes = dict(zip(CONFIG, QWEN[name][0], strict=True))
    config = {"model_type": "qwen2", "max_position_embeddings": 32_768, "dtype": "bfloat16", **sizes}
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


@pytest.fixture
def planned(capsys):
    def run(*arguments: str) -> tuple[int, dict[str, Any]]:
        status = main([*arguments, "--json"])
        return status, json.loads(capsys.readouterr().out)["runs"]

    return run


def held(run: dict[str, Any], what: str, column: str) -> int:
    return sum(need["bytes"].get(column, 0) for need in run["needs"] if need["what"].endswith(what))


@pytest.mark.parametrize("name", QWEN)
def test_sizes_are_those_published(name: str, tmp_path: Path) -> None:
    found = _sizes(config_folder(tmp_path, name), "model.path")
    assert found.numbers.parameters == QWEN[name][1]
    assert (
        found.root_parameters == (2 - found.numbers.tied) * found.numbers.head_parameters + QWEN[name][0][0]
    )


def test_states_are_exact_and_shared_by_the_shards(tmp_path: Path, planned) -> None:
    status, runs = planned(recipe(tmp_path, "1.5B", NARROW), "--student.shard_size", "4")
    run = runs["student"]
    assert status == 0 and all(each["fits"] for each in runs.values())
    assert held(run, "masters, fp32", "rollout") == held(run, "gradients, fp32", "update") == SMALL
    assert held(run, "AdamW, fp32", "update") == 2 * SMALL
    assert run["totals"]["update"] == sum(need["bytes"].get("update", 0) for need in run["needs"])


@pytest.mark.parametrize(
    ("changes", "models", "adapters"),
    [
        ({}, 2, 0),
        (LORA_TEACHERS, 1, 2),
        (merged(LORA_TEACHERS, KL_REF), 1, 2),
        (KL_REF, 3, 0),
        (merged(KL_REF, {"runs": {"student": {"set": LORA}}}), 2, 0),
        ({"runs": {"student": {"set": {"kl_ref": {"coef": 0.1, "model": "format_teacher"}}}}}, 2, 0),
        (merged(PRODUCT, KL_REF), 3, 0),
    ],
    ids=["full", "lora", "lora-and-reference", "reference", "under-the-student", "a-teacher", "product"],
)
def test_frozen_models_are_counted_as_they_are_held(
    changes: dict[str, Any], models: int, adapters: int, tmp_path: Path, planned
) -> None:
    """LoRA teachers and their base stand once; a reference of either kind where nothing else holds it."""
    _, runs = planned(recipe(tmp_path, "1.5B", changes))
    adapter = _sizes(str(tmp_path / "qwen1.5B"), "model.path").adapter(32, ["all-linear"])
    assert held(runs["student"], "teachers' weights", "teachers") == 4 * (models * SMALL + adapters * adapter)


def test_with_a_lag_sampling_and_update_hold_their_memory_together(tmp_path: Path, planned) -> None:
    path = recipe(tmp_path, "1.5B")
    (_, alone), (_, beside) = (
        planned(path),
        planned(path, "--loop.async_level", "1", "--loss.old_logps", "rollout"),
    )
    cache = sum(held(beside["student"], what, "rollout") for what in ("KV cache", "sampling"))
    assert cache > 0
    assert beside["student"]["totals"]["update"] == alone["student"]["totals"]["update"] + cache


def test_engines_are_planned_as_they_are_made(tmp_path: Path, planned) -> None:
    """The rollout engine takes its quarter; teachers' engines stay awake, or take turns in processes."""
    path = recipe(tmp_path, "1.5B", VLLM, NARROW)
    run = planned(path)[1]["student"]
    free = 77 * GIB - SMALL // 2 - 2 * SMALL - WORK
    assert held(run, "rollout KV cache", "rollout") == pytest.approx(free / 4, abs=2)
    assert held(run, "rollout KV cache", "update") == 0
    cache = 2 * (16_384 + 2048 + 16) * POSITION
    for column in ("rollout", "update"):
        assert held(run, "KV cache", column) - held(run, "rollout KV cache", column) == cache
    run = planned(path, "--teachers.vllm.engine_kwargs.kv_cache_memory_bytes", str(GIB))[1]["student"]
    assert held(run, "KV cache", "update") == 2 * GIB
    run = planned(path, "--teachers.vllm.placement", "process")[1]["student"]
    one = 2 * SMALL + cache // 2 + WORK
    assert (held(run, "in turn", "teachers"), held(run, "in turn", "update")) == (one, 0)


def test_engines_of_earlier_runs_take_their_room(tmp_path: Path, planned) -> None:
    """Of a process's two rollout engines the first sleeps, that of the LoRA run cannot; it comes later."""
    path = recipe(tmp_path, "1.5B", VLLM, NARROW, {"runs": {"accuracy_teacher": {"set": LORA}}})
    _, runs = planned(path)
    assert list(runs) == ["format_teacher", "accuracy_teacher", "student"]
    other = runs["accuracy_teacher"]
    assert held(runs["format_teacher"], "KV cache", "update") == 0
    assert held(other, "KV cache", "update") == held(other, "KV cache", "rollout") > 0
    left = held(runs["student"], "engines of earlier runs", "update")
    assert left > held(other, "KV cache", "update")
    _, alone = planned(path, "--only", "student")
    assert list(alone) == ["student"] and held(alone["student"], "engines of earlier runs", "update") == 0


def test_preference_models_are_counted_where_they_are(tmp_path: Path, planned) -> None:
    """In the rewards' processes on the same GPU; not behind a server, nor on a CPU."""
    function = "smopd.rewards.preference_model:preference_reward"
    model = config_folder(tmp_path, "7B")
    for given, models in (({}, 2), ({"url": "http://a:1"}, 1), ({"device": "cpu"}, 1)):
        rewards = [
            {"name": name, "function": function, "kwargs": {"model": model, **more}}
            for name, more in (("accuracy", {}), ("format", given))
        ]
        run = planned(recipe(tmp_path, "1.5B", {"rewards": rewards}))[1]["student"]
        found = sum(held(run, f"preference model, {name}", "rollout") for name in ("accuracy", "format"))
        assert found == models * 2 * (QWEN["7B"][1] - 3584 * 152_064)


def test_what_does_not_fit_is_said_in_plain_text(tmp_path: Path, capsys) -> None:
    assert main([recipe(tmp_path, "7B"), "--gpus", "1"]) == 1
    out = capsys.readouterr().out
    assert out.isascii() and "\x1b" not in out
    for text in (
        "AdamW, fp32",
        "teachers' weights",
        "usable: 77.00 GiB a GPU",
        "run student: ",
        "does not fit, by",
    ):
        assert text in out


def test_models_that_a_factory_makes(planned) -> None:
    status, runs = planned("quickstart", "--gpus", "2", "--gpu-memory", "8")
    assert status == 0 and {"accuracy_teacher", "format_teacher", "smopd"} <= runs.keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "8"], "--gpu: no such option"),
        (["--gpus", "0"], "--gpus: got 0"),
        (["--only", "studnt"], "did you mean student"),
        (["--student.shard_size", "3"], "student.shard_size: got 3, expected a divisor of 8 GPUs"),
        (["--rollout.max_new_tokens", "40000"], "positions"),
        (["--model.path", "."], "model.path"),
    ],
)
def test_mistakes_are_answered(arguments: list[str], message: str, tmp_path: Path, capsys) -> None:
    assert main([recipe(tmp_path, "1.5B"), *arguments]) == 2
    assert message in capsys.readouterr().err
