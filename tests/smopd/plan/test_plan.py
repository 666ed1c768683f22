"""The planner: sizes from configs, its arithmetic against measured peaks, its verdicts and its advice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from smopd.config.settings import Settings, merged
from smopd.engine.vllm.memory import GIB, WORK
from smopd.kernels.head.chunks import ROW_UNIT_CPU
from smopd.kernels.head.gemm import cpu_multiplies_bf16
from smopd.plan.__main__ import main
from smopd.plan.memory import MicroBatch, Training, update_moments
from smopd.plan.models import measured, sizes_of
from tests import warm
from tests.smopd.plan.plan_worker import Case, make_model
from tests.smopd.recipes import write_recipe

QWEN = {  # the numbers of CONFIG, and how many parameters they make: as published
    "1.5B": ((1536, 8960, 28, 12, 2, 151_936, True), 1_543_714_304),
    "3B": ((2048, 11_008, 36, 16, 2, 151_936, True), 3_085_938_688),
    "7B": ((3584, 18_944, 28, 28, 4, 152_064, False), 7_615_616_512),
}
CONFIG = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "tie_word_embeddings",
)

CASES = {
    "plain": Case(),
    "checkpointed": Case(checkpointing=True),
    "narrow-and-deep": Case(layers=10, hidden=32, intermediate=96),
    "no-groups": Case(kv_heads=4),
    "llama": Case(family="llama"),
    "half-the-tokens": Case(rows=3),
    "long-row": Case(intermediate=96, rows=1, prompt=16, answer=101),
    "under-a-mask": Case(attention="sdpa"),
    "long-row-under-a-mask": Case(attention="sdpa", intermediate=96, rows=1, prompt=16, answer=101),
    "large-vocabulary-one-chunk": Case(layers=2, vocabulary=4096),
    "large-vocabulary-chunks": Case(layers=2, vocabulary=4096, chunk_bytes=1 << 20),
    "tied": Case(layers=2, vocabulary=4096, tied=True, rows=1, chunk_bytes=1 << 18),
    "large-vocabulary-checkpointed": Case(vocabulary=4096, checkpointing=True, rows=2, chunk_bytes=1 << 18),
    "parameters-alone": Case(layers=3, hidden=128, intermediate=384, rows=1, prompt=4, answer=5),
    "bfloat16": Case(dtype="bfloat16"),
    "bfloat16-checkpointed": Case(dtype="bfloat16", checkpointing=True),
}
TWO_RANKS = {
    "two-ranks": Case(),
    "two-ranks-checkpointed": Case(checkpointing=True, layers=6, rows=3),
    "two-ranks-parameters": Case(layers=3, hidden=128, intermediate=384, rows=1, prompt=4, answer=5),
}
TOLERANCE = 0.15


def measure(cases: dict[str, Case], ranks: int) -> dict[str, dict[str, Any]]:
    texts = [json.dumps(vars(case)) for case in cases.values()]
    done = warm.on_ranks(ranks, "-m", "tests.smopd.plan.plan_worker", *texts)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return dict(zip(cases, lines, strict=True))


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    return measure(CASES, 1) | measure(TWO_RANKS, 2)


def moments_of(case: Case, ranks: int) -> tuple[int, dict[str, dict[str, int]]]:
    """Parameters, and the update's moments, as smopd.plan.budget takes them."""
    sizes = measured(make_model(case), "test")
    tokens = case.rows * case.row_length
    mask = tokens * case.row_length if case.attention == "sdpa" else 0
    batch = MicroBatch(tokens, mask, case.responses)
    width = 4 if case.dtype == "float32" else 2
    training = Training(width, ranks, case.chunk_bytes, case.checkpointing, row_unit=ROW_UNIT_CPU)
    moments = update_moments(sizes, batch, training)
    if width == 2 and not cpu_multiplies_bf16():  # then products go through fp32 copies
        rows, hidden, vocabulary = case.responses, case.hidden, case.vocabulary
        moments["the loss"]["widened"] = 4 * (rows * vocabulary + rows * hidden + vocabulary * hidden)
    return sizes.parameters, moments


def predicted(case: Case, ranks: int) -> dict[str, int]:
    parameters, moments = moments_of(case, ranks)
    shard = 4 * parameters // ranks
    widest = max(sum(held.values()) for held in moments.values())
    return {"masters": shard, "gradients": shard, "optimizer": 2 * shard, "peak": shard + widest}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CASES, *TWO_RANKS])
def test_states_are_exact(name: str, found) -> None:
    ranks = 2 if name in TWO_RANKS else 1
    expected = predicted({**CASES, **TWO_RANKS}[name], ranks)
    for part in ("masters", "gradients", "optimizer"):
        assert found[name][part] == expected[part]
    assert found[name]["micro_batches"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CASES, *TWO_RANKS])
def test_peak_of_an_update(name: str, found) -> None:
    ranks = 2 if name in TWO_RANKS else 1
    expected = predicted({**CASES, **TWO_RANKS}[name], ranks)
    assert found[name]["peak"] == pytest.approx(expected["peak"], rel=TOLERANCE)


def test_cases_reach_every_part_of_the_arithmetic() -> None:
    """Else a term could be wrong unnoticed."""
    widest = set()
    for name, case in {**CASES, **TWO_RANKS}.items():
        _, moments = moments_of(case, 2 if name in TWO_RANKS else 1)
        widest.add(max(moments, key=lambda moment: sum(moments[moment].values())))
    assert len(widest) >= 4, widest


def config_folder(folder: Path, name: str) -> Path:
    """A folder with config.json and nothing else."""
    place = folder / f"qwen{name}"
    place.mkdir(exist_ok=True)
    sizes = dict(zip(CONFIG, QWEN[name][0], strict=True))
    config = {"model_type": "qwen2", "max_position_embeddings": 32_768, "dtype": "bfloat16", **sizes}
    (place / "config.json").write_text(json.dumps(config))
    return place


@pytest.mark.parametrize("name", QWEN)
def test_sizes_are_those_published(name: str, tmp_path: Path) -> None:
    sizes = sizes_of(str(config_folder(tmp_path, name)))
    *_, kv_heads, _, tied = QWEN[name][0]
    assert sizes.parameters == QWEN[name][1]
    assert sizes.tied == tied
    assert sizes.root_parameters == (1 if sizes.tied else 2) * sizes.head_parameters + sizes.hidden
    assert sizes.kv_bytes(2) == 2 * sizes.layers * kv_heads * 128 * 2


def plan_recipe(folder: Path, model: str, changes: dict[str, Any] | None = None) -> Path:
    data = {"data": {"max_prompt_tokens": 1024}, "rollout": {"max_new_tokens": 1024, "dtype": "bfloat16"}}
    values = {**data, "loop": {"prompts_per_step": 64, "updates_per_step": 1}}
    recipe = write_recipe(folder, merged(values, changes or {}), ("model",))
    place = config_folder(folder, model)
    text = recipe.read_text() + f"model: {{path: {place}}}\n"
    recipe.write_text(text)
    return recipe


def run_plan(capsys, *arguments: str) -> tuple[int, dict[str, Any]]:
    status = main([*arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_a_run_that_fits(tmp_path: Path, capsys) -> None:
    recipe = plan_recipe(tmp_path, "1.5B")
    more = ("--student.gradient_checkpointing", "true", "--student.compute_dtype", "bfloat16")
    status, found = run_plan(capsys, str(recipe), "--gpus", "8", "--gpu-memory", "80", *more)
    assert (status, found["fits"]) == (0, True)
    run = found["runs"]["student"]
    masters = next(need for need in run["needs"] if need["what"] == "parameters, fp32 masters")
    assert masters["bytes"]["update"] == 4 * QWEN["1.5B"][1] / 8
    assert run["sync"]["bytes"] == 4 * QWEN["1.5B"][1] * 7 // 8
    assert run["totals"]["update"] == sum(need["bytes"].get("update", 0) for need in run["needs"])


def test_with_a_lag_sampling_and_update_hold_their_memory_together(tmp_path: Path, capsys) -> None:
    recipe = str(plan_recipe(tmp_path, "1.5B"))
    lag = ("--loop.lag", "1", "--loss.old_logps", "rollout")
    (_, without), (_, beside) = run_plan(capsys, recipe), run_plan(capsys, recipe, *lag)
    before, after = (found["runs"]["student"] for found in (without, beside))
    held = {need["what"]: need["bytes"] for need in after["needs"]}
    cache = held["KV cache"]["rollout"] + held["sampling"]["rollout"]
    assert cache > 0
    assert after["totals"]["rollout"] == before["totals"]["rollout"]
    assert after["totals"]["update"] == before["totals"]["update"] + cache


LORA = {"student": {"lora": {"rank": 32, "alpha": 64}}}
LORA_TEACHERS = {"runs": {name: {"set": LORA} for name in ("accuracy_teacher", "format_teacher")}}


PRODUCT = {"runs": {"student": {"set": {"opd": {"support": "product"}}}}}


def held(run: dict[str, Any], what: str, column: str) -> int:
    return next((need["bytes"].get(column, 0) for need in run["needs"] if need["what"] == what), 0)


@pytest.mark.parametrize(
    ("changes", "models", "adapters"),
    [
        ({}, 2, 0),
        (LORA_TEACHERS, 1, 2),
        (merged(LORA_TEACHERS, {"kl_ref": {"coef": 0.1}}), 1, 2),
        ({"kl_ref": {"coef": 0.1}}, 3, 0),
        ({"kl_ref": {"coef": 0.1}, "runs": {"student": {"set": LORA}}}, 2, 0),
        ({"runs": {"student": {"set": {"kl_ref": {"coef": 0.1, "model": "format_teacher"}}}}}, 2, 0),
        (PRODUCT, 3, 0),
        (merged(PRODUCT, {"kl_ref": {"coef": 0.1}}), 3, 0),
        (merged(PRODUCT, LORA_TEACHERS), 1, 2),
    ],
    ids=[
        *("full", "lora", "lora-over-the-reference", "reference", "reference-under-the-student", "a-teacher"),
        *("product", "product-over-the-reference", "product-of-lora"),
    ],
)
def test_frozen_models_are_counted_as_they_are_held(
    changes: dict[str, Any], models: int, adapters: int, tmp_path: Path, capsys
) -> None:
    """LoRA teachers and their base stand once; a reference of either kind where nothing else holds it."""
    _, found = run_plan(capsys, str(plan_recipe(tmp_path, "1.5B", changes)))
    parameters = QWEN["1.5B"][1]
    adapter = sizes_of(str(tmp_path / "qwen1.5B")).lora_parameters(32, ["all-linear"])
    expected = 4 * (models * parameters + adapters * adapter)
    assert held(found["runs"]["student"], "teachers' weights", "teachers") == expected


def test_a_products_reference_gives_its_entries_too(tmp_path: Path, capsys) -> None:
    rows = {}
    for name, changes in (("mixture", {"teachers": {"union": True}}), ("product", PRODUCT)):
        _, found = run_plan(capsys, str(plan_recipe(tmp_path, "1.5B", changes)))
        rows[name] = held(found["runs"]["student"], "teachers' top-kappa", "teachers")
        notes = [need["note"] for need in found["runs"]["student"]["needs"]]
        assert ("2 teachers, their product's reference" in notes) == (name == "product"), notes
    tokens = rows["mixture"] // (2 * (2 * 16 * 8 + 4))
    assert rows["mixture"] == tokens * 2 * (2 * 16 * 8 + 4)
    assert rows["product"] == tokens * 3 * (3 * 16 * 8 + 4)


def test_the_reference_policy_shares_no_engine_with_teachers(tmp_path: Path, capsys) -> None:
    own = {"sleep": False, "engines": 1}
    one = {"teachers": {"engine": "vllm", "vllm": own}}
    for changes, engines in ((one, 1), ({**one, "kl_ref": {"coef": 0.1}}, 2)):
        _, found = run_plan(capsys, str(plan_recipe(tmp_path, "1.5B", changes)))
        run = found["runs"]["student"]
        assert held(run, "teachers' weights", "teachers") == engines * 4 * QWEN["1.5B"][1]
        assert held(run, "teachers' vLLM work", "teachers") == engines * WORK


VLLM = {"rollout": {"engine": "vllm"}, "teachers": {"engine": "vllm", "dtype": "bfloat16"}}
NARROW = {"student": {"compute_dtype": "bfloat16", "gradient_checkpointing": True}}


def test_engines_are_planned_as_they_are_made(tmp_path: Path, capsys) -> None:
    """Caches add up; the rollout engine takes its quarter, wanted or not; teachers' engines stay awake."""
    _, found = run_plan(capsys, str(plan_recipe(tmp_path, "1.5B", merged(VLLM, NARROW))))
    run, sizes = found["runs"]["student"], sizes_of(str(tmp_path / "qwen1.5B"))
    free = 77 * GIB - 4 * sizes.parameters // 8 - 2 * sizes.parameters - WORK
    assert held(run, "KV cache", "rollout") == pytest.approx(free / 4, abs=2)
    assert held(run, "KV cache", "update") == 0
    positions = 16_384 + 2048 + 16
    for column in ("rollout", "update"):
        assert held(run, "teachers' KV cache", column) == 2 * positions * sizes.kv_bytes(2)
        assert held(run, "teachers' weights", column) == 2 * 2 * sizes.parameters
    more = ("--teachers.vllm.kv_cache_bytes", str(GIB))
    _, found = run_plan(capsys, str(tmp_path / "recipe.yaml"), *more)
    assert held(found["runs"]["student"], "teachers' KV cache", "update") == 2 * GIB
    turns = ("--teachers.vllm.placement", "process")
    _, found = run_plan(capsys, str(tmp_path / "recipe.yaml"), *turns)
    for column, engines in (("teachers", 1), ("update", 0)):
        assert held(found["runs"]["student"], "teachers' weights", column) == engines * 2 * sizes.parameters


def test_engines_of_earlier_runs_are_still_there(tmp_path: Path, capsys) -> None:
    """Of a process's two rollout engines the first sleeps, that of the LoRA run cannot."""
    lora = {"runs": {"accuracy_teacher": {"set": LORA}}}
    _, found = run_plan(capsys, str(plan_recipe(tmp_path, "1.5B", merged(merged(VLLM, NARROW), lora))))
    first, other = found["runs"]["format_teacher"], found["runs"]["accuracy_teacher"]
    assert held(first, "KV cache", "update") == 0
    assert held(other, "KV cache", "update") == held(other, "KV cache", "rollout") > 0
    assert held(other, "engines of earlier runs", "update") == 0


SCORER = {"name": "accuracy", "function": "smopd.rewards.preference_model:preference_reward"}


def test_preference_models_are_counted_where_they_are(tmp_path: Path, capsys) -> None:
    """In the rewards' processes on the same GPU; not behind a server, nor on a CPU."""
    model = str(config_folder(tmp_path, "7B"))
    for given, models in (({}, 2), ({"url": "http://a:1"}, 1), ({"device": "cpu"}, 1)):
        scorers = [{**SCORER, "kwargs": {"model": model}}]
        scorers.append({**SCORER, "name": "format", "kwargs": {"model": model, **given}})
        _, found = run_plan(capsys, str(plan_recipe(tmp_path, "1.5B", {"rewards": scorers})))
        without_head = QWEN["7B"][1] - 3584 * 152_064
        for column in ("rollout", "update"):
            assert held(found["runs"]["student"], "preference models", column) == models * 2 * without_head
        assert held(found["runs"]["student"], "preference models' forward", "update") > 0


def test_runs_of_adapters_come_last_and_some_may_be_planned_alone(tmp_path: Path, capsys) -> None:
    lora = {"runs": {"accuracy_teacher": {"set": LORA}, "gdpo": {"stage": "control"}}}
    recipe = str(plan_recipe(tmp_path, "1.5B", merged(merged(VLLM, NARROW), lora)))
    _, found = run_plan(capsys, recipe)
    assert list(found["runs"]) == ["format_teacher", "gdpo", "accuracy_teacher", "student"]
    assert held(found["runs"]["student"], "engines of earlier runs", "update") > 0
    _, found = run_plan(capsys, recipe, "--only", "student")
    assert list(found["runs"]) == ["student"]
    assert held(found["runs"]["student"], "engines of earlier runs", "update") == 0


def test_the_recipe_of_the_papers_7b_fits_as_it_stands(tmp_path: Path, capsys) -> None:
    model = str(config_folder(tmp_path, "7B"))
    paths = [
        f"--{name}={model}" for name in ("model.path", "rewards.0.kwargs.model", "rewards.1.kwargs.model")
    ]
    status, found = run_plan(capsys, "safe_qwen2.5_7b", *paths)
    assert status == 0, {name: run["totals"] for name, run in found["runs"].items() if not run["fits"]}
    assert held(found["runs"]["smopd"], "preference models", "update") > 0


def test_advice_knows_the_teachers_engines(tmp_path: Path, capsys) -> None:
    recipe = plan_recipe(tmp_path, "7B", merged(VLLM, NARROW))
    _, found = run_plan(capsys, str(recipe), "--gpu-memory", "70")
    offered = {setting for changes in found["runs"]["student"]["advice"] for setting in changes}
    assert {"teachers.vllm.engines", "teachers.vllm.placement", "rollout.vllm.kv_cache_bytes"} <= offered


def test_sync_of_adapters_and_of_servers(tmp_path: Path, capsys) -> None:
    """A LoRA student goes to an engine here as adapters, and to servers merged; nothing is cast."""
    urls = {"rollout": {"engine": "vllm", "urls": ["http://a:1", "http://b:1"]}}
    sizes = sizes_of(str(config_folder(tmp_path, "1.5B")))
    parameters, adapter = sizes.parameters, sizes.lora_parameters(32, ["all-linear"])
    merged_bytes = 4 * parameters - 2 * sizes.root_parameters  # embeddings stay in bfloat16
    head = sizes.head_parameters  # goes twice, under both its names
    expected = [
        ({"rollout": {"engine": "vllm"}}, 4 * parameters * 7 // 8),
        (urls, 4 * parameters * 7 // 8 + 2 * 4 * (parameters + head)),
        (merged(LORA, {"rollout": {"engine": "vllm"}}), 4 * adapter * 7 // 8),
        (merged(LORA, urls), (2 * parameters + 4 * adapter) * 7 // 8 + 2 * (merged_bytes + 2 * head)),
        (LORA, (2 * parameters + 4 * adapter) * 7 // 8),
    ]
    for changes, sent in expected:
        bfloat16 = {"student": {"compute_dtype": "bfloat16"}}
        recipe = plan_recipe(tmp_path, "1.5B", merged(bfloat16, changes))
        _, found = run_plan(capsys, str(recipe), "--gpus", "8", "--gpu-memory", "800")
        assert found["runs"]["student"]["sync"]["bytes"] == sent, changes


def test_advice_makes_it_fit(tmp_path: Path, capsys) -> None:
    recipe = plan_recipe(tmp_path, "7B")
    arguments = (str(recipe), "--gpus", "8", "--gpu-memory", "80")
    status, found = run_plan(capsys, *arguments)
    assert status == 1
    assert not found["fits"]
    advice = found["runs"]["student"]["advice"]
    assert advice
    for changes in advice:
        options = [word for setting, value in changes.items() for word in option(setting, value)]
        _, again = run_plan(capsys, *arguments, *options)
        assert again["runs"]["student"]["fits"], changes


def option(setting: str, value: Any) -> tuple[str, str]:
    return (setting if setting.startswith("--") else f"--{setting}", json.dumps(value).strip('"'))


def test_settings_in_advice_exist(tmp_path: Path, capsys) -> None:
    recipe = plan_recipe(tmp_path, "7B")
    _, found = run_plan(capsys, str(recipe), "--gpus", "1", "--gpu-memory", "16")
    for changes in found["runs"]["student"]["advice"]:
        for setting in changes:
            node: Any = Settings
            for name in setting.split(".") if not setting.startswith("--") else ():
                assert name in node.model_fields
                node = node.model_fields[name].annotation


def test_plain_table_where_there_is_no_terminal(tmp_path: Path, capsys) -> None:
    status = main([str(plan_recipe(tmp_path, "3B")), "--gpus", "64", "--run", "student"])
    out = capsys.readouterr().out
    assert status in (0, 1)
    assert "\x1b" not in out
    assert out.isascii()
    for text in ("optimizer, AdamW", "KV cache", "teachers' weights", "weight sync", "assumed"):
        assert text in out


def test_factory_models_are_planned_on_the_meta_device(capsys) -> None:
    status, found = run_plan(capsys, "quickstart", "--gpus", "2", "--gpu-memory", "8")
    assert (status, set(found["runs"])) == (
        0,
        {
            "gdpo",
            "accuracy_teacher",
            "format_teacher",
            "smopd_paper",
            "smopd",
            "sequential",
            "sequential_long",
        },
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "8"], "--gpu: no such option"),
        (["--gpus", "0"], "--gpus: got 0"),
        (["--run", "studnt"], "did you mean student"),
        (["--only", "studnt"], "did you mean student"),
        (["--student.micro_batch_token", "5"], "student.micro_batch_tokens"),
        (["--rollout.max_new_tokens", "40000"], "positions"),
    ],
)
def test_mistakes_are_answered(arguments: list[str], message: str, tmp_path: Path, capsys) -> None:
    assert main([str(plan_recipe(tmp_path, "1.5B")), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_config(tmp_path: Path, capsys) -> None:
    recipe = plan_recipe(tmp_path, "1.5B")
    (tmp_path / "qwen1.5B" / "config.json").unlink()
    assert main([str(recipe)]) == 2
    assert "model.path" in capsys.readouterr().err
