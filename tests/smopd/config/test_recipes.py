"""The paper's recipes: each resolves, says what the paper's tables say, and runs with a tiny model."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smopd.config.cli import describe, parse, read_settings
from smopd.config.recipe import builtin
from smopd.config.settings import Settings
from smopd.data.alpaca import prompt_row
from tests.smopd.recipes import ROOT, environment, metric_lines, train_here

RLLA = {"rlla_qwen2.5_1.5b": 150, "rlla_qwen2.5_3b": 100, "rlla_qwen2.5_3b_moderate": 100}
SAFE = {"safe_qwen2.5_3b": 100, "safe_qwen2.5_7b": 66, "safe_llama3.2_3b": 100}
MODELS = {
    "rlla_qwen2.5_1.5b": "Qwen/Qwen2.5-1.5B-Instruct",
    "rlla_qwen2.5_3b": "Qwen/Qwen2.5-3B-Instruct",
    "rlla_qwen2.5_3b_moderate": "Qwen/Qwen2.5-3B-Instruct",
    "safe_qwen2.5_3b": "Qwen/Qwen2.5-3B-Instruct",
    "safe_qwen2.5_7b": "Qwen/Qwen2.5-7B-Instruct",
    "safe_llama3.2_3b": "meta-llama/Llama-3.2-3B-Instruct",
}
RECIPES = sorted(MODELS)
WITHOUT_A_TABLE = ["quickstart", "rlla_scratch"]
RANKS, VOCABULARY = 8_000, 8_064  # Qwen's first ranks; test_rlla_scratch.py takes them all, 151,643
LLAMA_BEGIN = "<|begin_of_text|>"
LLAMA_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim }}"
    "{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
TEACHERS = {"rlla": ["accuracy_teacher", "format_teacher"], "safe": ["useful_teacher", "harmless_teacher"]}
METHODS = ["gdpo", "smopd", "smopd_sequence_gate", "smopd_token_gate"]
BASELINES = ["grpo", "gd2po"]
FROM_TEACHERS = ["guarded_merge", "sequential"]  # ours, of fewer steps
OURS = ["smopd_merged_tail", "smopd_gd2po_anchor", "smopd_lora_teachers"]


def runs(recipe: str) -> dict[str, Settings]:
    """The resolved settings of each run."""
    settings = read_settings(recipe)
    return {name: settings.resolved(name) for name in settings.runs}


def teachers(recipe: str) -> list[str]:
    return TEACHERS[recipe.partition("_")[0]]


def test_every_recipe_of_the_package_is_known_here() -> None:
    assert sorted(builtin()) == sorted([*RECIPES, *WITHOUT_A_TABLE])


@pytest.mark.parametrize("recipe", builtin())
def test_every_recipe_resolves(recipe: str) -> None:
    command = parse([recipe, "--dry-run"])
    text = describe(command)
    assert command.settings.name == recipe
    assert all(f"  {run} " in text for run in command.settings.runs)
    assert all(run.label for run in command.settings.runs.values())
    if recipe not in WITHOUT_A_TABLE:
        assert all(run.reproduces for run in command.settings.runs.values())


def test_a_dry_run_needs_neither_torch_nor_a_network() -> None:
    code = (
        "import socket, sys\n"
        "def refuse(*args, **kwargs): raise OSError('no network in a dry run')\n"
        "socket.socket.connect = refuse\n"
        "from smopd.train import main\n"
        "for recipe in sys.argv[1:]:\n"
        "    assert main([recipe, '--dry-run']) == 0\n"
        "print('torch' in sys.modules, 'transformers' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *RECIPES], cwd=ROOT, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False False"


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_both_settings_share(recipe: str) -> None:
    """Appendix A, and the rows that Tables 5 and 6 have in common."""
    for name, own in runs(recipe).items():
        assert own.model.path == MODELS[recipe]
        share = 0.6 if name in FROM_TEACHERS else 1
        assert own.loop.steps == round(share * {**RLLA, **SAFE}[recipe])
        assert own.processes == 8 and own.rollout.vllm.engine_kwargs == {"tensor_parallel_size": 1}
        assert own.rollout.max_new_tokens == 1024
        assert own.opd.coef == 1.0 and own.opd.schedule == "constant" and own.opd.temperature == 1.0
        assert own.evaluation.top_p == 1.0 and own.evaluation.max_new_tokens is None
        assert own.opd.gate.floor == 0.2
        assert own.merge.method == ("weights" if name == "guarded_merge" else "published")
        assert len(own.teachers.models) == 2
        adapter = name.endswith("_teacher_lora")
        assert (own.student.lora is not None) == adapter
        assert own.student.learning_rate == (1e-5 if adapter else 1e-6)
        own_weights = own.runs[name].reward_weights
        assert (own_weights is not None) == (own.runs[name].stage == "specialize")
        if own_weights is None:
            assert own.weights(name) == [0.5, 0.5]


@pytest.mark.parametrize("recipe", RLLA)
def test_table_5(recipe: str) -> None:
    for own in runs(recipe).values():
        assert (own.data.train.source, own.data.evaluation.source) == ("rlla/train", "rlla/test")
        assert [(reward.name, reward.range) for reward in own.rewards] == [
            ("accuracy", (-3.0, 3.0)),
            ("format", (0.0, 1.0)),
        ]
        assert own.rewards[0].kwargs == {"score_range": [-3, 3]} and own.rewards[1].kwargs == {}
        assert own.rollout.group_size == 8
    steep = (0.7, 0.3) if recipe.endswith("moderate") else (0.9, 0.1)
    settings = read_settings(recipe)
    assert settings.weights("accuracy_teacher") == list(steep)
    assert settings.weights("format_teacher") == list(reversed(steep))


@pytest.mark.parametrize("recipe", SAFE)
def test_table_6(recipe: str) -> None:
    for own in runs(recipe).values():
        assert (own.data.train.source, own.data.evaluation.source) == (
            "safe/alpaca_train",
            "safe/alpaca_test",
        )
        assert [(reward.name, reward.kwargs["sign"]) for reward in own.rewards] == [
            ("useful", 1),
            ("harmless", 1),
        ]
        models = [reward.kwargs["model"].rpartition("/")[2] for reward in own.rewards]
        assert models == ["Qwen2.5-7B-SafeRLHF-RM", "Qwen2.5-7B-SafeRLHF-CM"]
        read = {(reward.kwargs["max_tokens"], reward.kwargs["truncation_side"]) for reward in own.rewards}
        assert read == {(2048, "right")}
        assert (own.loop.prompts_per_step, own.loop.prompts_per_step // own.loop.updates_per_step) == (
            512,
            128,
        )
        assert own.rollout.group_size == 4
        assert (own.rollout.temperature, own.rollout.top_p) == (0.7, 1.0)
    settings = read_settings(recipe)
    assert settings.weights("useful_teacher") == [0.7, 0.3]
    assert settings.weights("harmless_teacher") == [0.3, 0.7]


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_method_differs_in_what_the_paper_says(recipe: str) -> None:
    own = runs(recipe)
    moderate = recipe.endswith("moderate")
    assert set(own) >= {*METHODS, *teachers(recipe), *(() if moderate else (*BASELINES, *OURS))}
    for name, settings in own.items():
        expected = {"grpo": "grpo", "gd2po": "gd2po", "smopd_gd2po_anchor": "gd2po"}.get(name, "gdpo")
        advantage = settings.advantage
        assert advantage.estimator == expected and advantage.snr_threshold is None
        assert advantage.whiten == ("tokens" if expected == "gd2po" else "responses")
        kind = {"smopd_sequence_gate": "sequence", "smopd_token_gate": "token"}.get(name, "uniform")
        assert settings.opd.gate.kind == kind
        ours = name == "smopd_merged_tail"
        assert (settings.opd.target, settings.opd.tail) == (("merged", True) if ours else ("pooled", False))
        kappa = {"smopd_kappa32": 32, "smopd_kappa64": 64, "opd_only": 32}.get(name, 16)
        assert settings.opd.kappa == kappa
        assert settings.loss.anchor_coef == (0.0 if name == "opd_only" else 1.0)
        reverse = name == "smopd_reverse_kl"
        assert settings.opd.divergence == ("reverse_kl_sampled" if reverse else "forward_kl")
        suffix = "_lora" if name == "smopd_lora_teachers" else ""
        assert [teacher.model for teacher in settings.teachers.models] == [
            f"{teacher}{suffix}" for teacher in teachers(recipe)
        ]
    ablations = {"smopd_kappa32", "smopd_kappa64", "opd_only", "smopd_reverse_kl"}
    assert ablations & set(own) == (ablations if recipe == "safe_qwen2.5_7b" else set())


def test_the_list_says_what_each_run_reproduces(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        parse(["--list"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if len(line) <= 100]
    for recipe in RECIPES:
        at = lines.index([recipe])
        for run, settings in read_settings(recipe).runs.items():
            assert [run, *str(settings.reproduces).split()] in lines[at:]


def test_alpaca_rows_become_prompts() -> None:
    def content(**row: object) -> str:
        (message,) = prompt_row({"output": "o", "text": "t", **row})["prompt"]
        assert message["role"] == "user"
        return message["content"]

    assert content(instruction="Do it.", input="") == "Do it."
    assert content(instruction="Do it. ", input="this\n") == "Do it.\n\nthis"
    assert prompt_row({"prompt": [1], "output": "o"}) == {"prompt": [1]}
    with pytest.raises(ValueError, match=r"expected a prompt, or the texts .* got \['instruction'\]"):
        prompt_row({"instruction": "Do it."})


def save_tiny(kind: str, folder: Path, ranks: Path, seed: int = 0) -> str:
    """A random model of the kind with a tokenizer of the ranks, saved: "qwen2", "llama" or "preference"."""
    import torch
    from transformers import LlamaForCausalLM, Qwen2ForCausalLM, Qwen2ForSequenceClassification

    from smopd.worlds.models import qwen_tokenizer

    tokenizer = qwen_tokenizer(ranks)
    if kind == "llama":
        start, end, turn = "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"
        tokenizer.add_special_tokens(
            {"bos_token": LLAMA_BEGIN, "eos_token": turn, "additional_special_tokens": [start, end]}
        )
        tokenizer.chat_template = LLAMA_TEMPLATE
    assert len(tokenizer) < VOCABULARY
    made = {
        "qwen2": Qwen2ForCausalLM,
        "llama": LlamaForCausalLM,
        "preference": Qwen2ForSequenceClassification,
    }[kind]
    config = made.config_class(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **({"num_labels": 1} if kind == "preference" else {}),
    )
    torch.manual_seed(seed)
    made(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def real_data(recipe: str, data_set: Callable[[str], Path], folder: Path, ranks: Path) -> dict[str, Any]:
    """The family's data and reward models as overrides."""
    if recipe.startswith("rlla"):
        items = {"path": str(data_set("rlla/sft")), "exclude": str(data_set("rlla/test"))}
        return {
            "data.train": {"source": "smopd.evals.rlla:training_rows", "kwargs": items, "limit": 12},
            "data.evaluation.limit": 2,
        }
    assert data_set("safe/alpaca_train") and data_set("safe/alpaca_test")  # which the recipe names
    return {
        "data.train.limit": 12,
        "data.evaluation.limit": 2,
        "rewards.0.kwargs.model": save_tiny("preference", folder / "useful", ranks, 1),
        "rewards.1.kwargs.model": save_tiny("preference", folder / "harmless", ranks, 2),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "family"),
    [("rlla_qwen2.5_1.5b", "qwen2"), ("safe_llama3.2_3b", "llama")],
)
def test_three_steps_with_a_tiny_model_and_real_data(
    recipe: str, family: str, tmp_path: Path, data_set: Callable[[str], Path]
) -> None:
    ranks = tmp_path / "ranks.tiktoken"
    lines = data_set("tokenizer/qwen").read_bytes().splitlines(keepends=True)
    ranks.write_bytes(b"".join(lines[:RANKS]))
    overrides = {
        **real_data(recipe, data_set, tmp_path, ranks),
        "model.path": save_tiny(family, tmp_path / "policy", ranks),
        "output": str(tmp_path / "out"),
        "processes": 1,
        "rollout.engine": "local",
        "rollout.dtype": "float32",
        "rollout.group_size": 2,
        "rollout.max_new_tokens": 6,
        "teachers.dtype": "float32",
        "student.compute_dtype": "float32",
        "loop.steps": 3,
        "loop.prompts_per_step": 4,
        "evaluation.samples": 0,
    }
    words = [
        word
        for name, value in overrides.items()
        for word in (f"--{name}", value if isinstance(value, str) else json.dumps(value))
    ]
    chosen = [*teachers(recipe), "smopd"]
    done = train_here(recipe, *words, "--only", *chosen, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    for run in chosen:
        lines = metric_lines(tmp_path / "out" / run)
        assert [line["step"] for line in lines if "loss/pg" in line] == [1, 2, 3]
        for line in lines:
            assert all(value is not None and math.isfinite(value) for value in line.values()), line
        assert (tmp_path / "out" / run / "evaluation.json").is_file()
    if family == "llama":
        views = (tmp_path / "out" / "smopd" / "tokens.jsonl").read_text().splitlines()
        begun = f"{LLAMA_BEGIN}<|start_header_id|>user<|end_header_id|>\n\n"
        assert views and all(json.loads(view)["prompt"].startswith(begun) for view in views)
