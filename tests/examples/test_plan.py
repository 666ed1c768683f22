"""The planner: states, frozen models, engines, and the exit status."""

import json
from pathlib import Path
from typing import Any

from examples.plan import Need, Options, main, plan, totals
from smopd.config.cli import read_settings
from smopd.config.settings import merged
from tests.ranks import ROOT, python
from tests.smopd.recipes import write_recipe

CONFIG = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size"
QWEN = {  # published values of CONFIG for Qwen2.5, whether the head is tied, and the parameters
    "1.5B": ((1536, 8960, 28, 12, 2, 151_936), True, 1_543_714_304),
    "7B": ((3584, 18_944, 28, 28, 4, 152_064), False, 7_615_616_512),
}
SMALL = QWEN["1.5B"][2]
LORA = {"student": {"lora": {"rank": 32, "alpha": 64}}}
LORA_TEACHERS = {"runs": {name: {"set": LORA} for name in ("accuracy_teacher", "format_teacher")}}
KL_REF = {"kl_ref": {"coef": 0.1}}
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
    for change in ({"model": {"path": config_folder(folder, model)}}, *changes):
        values = merged(values, change)
    return str(write_recipe(folder, values, ("model",)))


def planned(recipe: str, **given: Any) -> dict[str, list[Need]]:
    return plan(Options(), read_settings(recipe, {name: [str(value)] for name, value in given.items()}))


def held(needs: list[Need], what: str, column: str) -> int:
    return sum(need.bytes.get(column, 0) for need in needs if need.what.endswith(what))


def test_states_are_exact_and_shared_by_the_shards(tmp_path: Path) -> None:
    run = planned(recipe(tmp_path, "1.5B", NARROW), **{"student.shard_size": 4})["student"]
    assert held(run, "master weights, fp32", "rollout") == held(run, "gradients, fp32", "update") == SMALL
    assert held(run, "AdamW, fp32", "update") == 2 * SMALL
    assert totals(run)["update"] == sum(need.bytes.get("update", 0) for need in run)


def test_frozen_models_are_counted_as_they_are_held(tmp_path: Path) -> None:
    """LoRA teachers share one base. A reference is counted unless another model is the same."""
    under_the_student = merged(KL_REF, {"runs": {"student": {"set": LORA}}})
    both = merged(LORA_TEACHERS, KL_REF)
    for changes, models in (({}, 2), (LORA_TEACHERS, 1), (both, 1), (KL_REF, 3), (under_the_student, 2)):
        run = planned(recipe(tmp_path, "1.5B", changes))["student"]
        assert held(run, "teachers' weights", "teachers") == 4 * models * SMALL, changes


def test_the_verdict_is_in_plain_text_and_in_the_exit_status(tmp_path: Path, capsys) -> None:
    assert main([recipe(tmp_path, "7B"), "--gpus", "1"]) == 1
    out = capsys.readouterr().out
    assert out.isascii() and "\x1b" not in out
    for text in ("AdamW, fp32", "usable: 77.00 GiB per GPU", "run student: ", "does not fit, by"):
        assert text in out
    assert main(["quickstart", "--only", "smopd", "--gpus", "2", "--gpu-memory", "8"]) == 0
    out = capsys.readouterr().out
    assert "run smopd: " in out and "run gdpo" not in out, "a model that a factory makes"
    assert main(["quickstart", "--only", "smop"]) == 2 and "did you mean smopd" in capsys.readouterr().err


def test_paths_and_functions_are_found_as_by_train(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    made = recipe(tmp_path, "1.5B", {"model": {"path": "~/qwen1.5B"}})
    assert main([made]) == 0
    (tmp_path / "mine.py").write_text("def make(seed): raise KeyError(seed)")
    words = [made, "--model.path", "null", "--model.factory", "mine:make"]
    done = python(str(ROOT / "examples/plan.py"), *words, cwd=tmp_path)
    assert done.returncode == 2 and ": mine:make raised KeyError: 0 (" in done.stderr
