"""TRL's settings under SMOPD's trainers, against TRL's own: whole runs, evaluation, LoRA, bf16, metrics."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="needs trl (the trl extra)")

from trl import DistillationConfig, DistillationTrainer, GRPOConfig, GRPOTrainer

from smopd.integrations.trl_loss import completions_of
from tests.integrations.tiny_trl import (
    LONGEST,
    assert_same_gradients,
    completions,
    distillation,
    grpo,
    hosts_own,
    lengths,
    loss_and_gradients,
    settings,
    teacher,
    vowels,
    with_old_logps,
)

ADVANTAGES = torch.tensor([1.0, -1.0, 0.5, -2.0])


def pair(what: str, folder: Path, student: Any = None, **options: Any) -> tuple[Any, Any]:
    """SMOPD's trainer where it has nothing to add, and TRL's."""
    if what == "grpo":
        ours = grpo(
            folder / "ours", [teacher(1)], student, opd_coef=0.0, advantage_estimator="trl", **options
        )
        args = GRPOConfig(**settings(folder / "theirs", num_generations=2, **options))
        return ours, hosts_own(GRPOTrainer, args, [lengths, vowels], student=student)
    size = teacher(1).config.vocab_size
    ours = distillation(folder / "ours", [teacher(1)], student, kappa=size, tail=False, **options)
    args = DistillationConfig(**settings(folder / "theirs", beta=0.0, **options))
    return ours, hosts_own(DistillationTrainer, args, teacher(1), student=student)


@pytest.mark.parametrize("what", ["distillation", "grpo"])
def test_whole_runs_with_accumulation_and_evaluation_are_trls(tmp_path: Path, what: str) -> None:
    """Two micro-batches a step. The same seed samples the same completions while the student is the same."""
    options = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "per_device_eval_batch_size": 4,
        "max_steps": 2,
        "optim": "sgd",
        "learning_rate": 0.1,
        "seed": 5,
    }
    runs = []
    for trainer in pair(what, tmp_path, **options):
        torch.manual_seed(0)
        trainer.train()
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        torch.manual_seed(0)
        losses.append(trainer.evaluate(trainer.train_dataset)["eval_loss"])
        runs.append((losses, dict(trainer.model.named_parameters())))
    (ours, our_parameters), (theirs, their_parameters) = runs
    assert len(ours) == 3
    assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    for name, parameter in their_parameters.items():
        torch.testing.assert_close(our_parameters[name], parameter, rtol=1e-5, atol=1e-6)


def lora(model: Any) -> Any:
    peft = pytest.importorskip("peft", reason="needs peft (the lora extra)")
    torch.manual_seed(0)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "up_proj"], r=4))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize("what", ["distillation", "grpo"])
def test_a_lora_student_has_trls_loss_and_gradients(tmp_path: Path, what: str) -> None:
    ours, theirs = pair(what, tmp_path, lora)
    inputs = with_old_logps(ours, completions(ours)) | {"advantages": ADVANTAGES}
    loss, gradients = loss_and_gradients(ours, inputs)
    expected, expected_gradients = loss_and_gradients(theirs, inputs)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-7)
    assert len(gradients) == len(expected_gradients) > 0 and all("lora" in name for name in gradients)
    assert_same_gradients(gradients, expected_gradients)


def scored_by_trl(trainer: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """(B, T) log-probabilities of the completions, from TRL's own head."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    with torch.no_grad():
        return trainer._get_per_token_logps_and_entropies(trainer.model.train(), ids, mask, LONGEST)[0]


@pytest.mark.parametrize("fp32_head", [False, True], ids=["bf16 head", "fp32 head"])
def test_under_autocast_the_head_is_trls(tmp_path: Path, fp32_head: bool) -> None:
    """fp32 weights and bf16=True, TRL's defaults: its log-probabilities of an unchanged student are ours."""
    options = {"bf16": True, "loss_type": "bnpo", "cast_lm_head_to_fp32": fp32_head}
    ours, theirs = pair("grpo", tmp_path, **options)
    inputs = completions(ours) | {"advantages": ADVANTAGES}
    inputs["old_per_token_logps"] = scored_by_trl(theirs, inputs)
    (loss, gradients), (expected, expected_gradients) = (
        loss_and_gradients(trainer, inputs) for trainer in (ours, theirs)
    )
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-7)
    for name, gradient in expected_gradients.items():
        off = (gradients[name] - gradient).norm() / gradient.norm()
        assert off < 2e-2, (name, float(off))


@pytest.mark.parametrize("what", ["distillation", "grpo"])
def test_tokens_of_tools_do_not_count_as_in_trl(tmp_path: Path, what: str) -> None:
    ours, theirs = pair(what, tmp_path)
    inputs = with_old_logps(ours, completions(ours)) | {"advantages": ADVANTAGES}
    everything, _ = loss_and_gradients(ours, inputs)
    inputs["tool_mask"] = torch.ones_like(inputs["completion_mask"])
    inputs["tool_mask"][:, 1] = 0
    inputs["num_items_in_batch"] = (inputs["completion_mask"] * inputs["tool_mask"]).sum().float()
    loss, gradients = loss_and_gradients(ours, inputs)
    expected, expected_gradients = loss_and_gradients(theirs, inputs)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-7)
    assert_same_gradients(gradients, expected_gradients)
    assert abs(loss - everything) > 1e-3


@pytest.mark.parametrize("width", [1, LONGEST], ids=["sequences", "tokens"])
def test_the_importance_weights_of_vllm_are_trls(tmp_path: Path, width: int) -> None:
    ours, theirs = pair("grpo", tmp_path)
    theirs.use_vllm = True  # its loss reads the weights only then
    inputs = with_old_logps(ours, completions(ours)) | {"advantages": ADVANTAGES}
    unweighted, _ = loss_and_gradients(ours, inputs)
    ratio = 2 * torch.rand(4, width, generator=torch.Generator().manual_seed(4))
    inputs["importance_sampling_ratio"] = ratio
    loss, gradients = loss_and_gradients(ours, inputs)
    expected, expected_gradients = loss_and_gradients(theirs, inputs)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-7)
    assert_same_gradients(gradients, expected_gradients)
    assert abs(loss - unweighted) > 1e-3


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_trls_metrics_of_the_loss_are_there(tmp_path: Path, loss_type: str) -> None:
    ours, theirs = pair("grpo", tmp_path, loss_type=loss_type, entropy_coef=0.01, epsilon_high=0.25)
    inputs = with_old_logps(ours, completions(ours)) | {"advantages": ADVANTAGES}
    for trainer in (ours, theirs):
        loss_and_gradients(trainer, inputs)
    logged, expected = (
        {name: values[-1] for name, values in trainer._metrics["train"].items()} for trainer in (ours, theirs)
    )
    assert "clip_ratio/low_min" in expected and "policy_loss" in expected
    assert any(value > 0 for name, value in expected.items() if name.startswith("clip_ratio"))
    assert logged.keys() - expected.keys() == {"opd/kl", "opd/teacher_mass", "opd/student_mass"}
    for name, value in expected.items():
        assert math.isclose(logged[name], value, rel_tol=1e-4, abs_tol=1e-6), name


def test_adapters_that_the_loss_would_miss_are_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs peft (the lora extra)")

    def prompted(model: Any) -> Any:
        config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
        return peft.get_peft_model(model, config)

    def on_the_head(model: Any) -> Any:
        return peft.get_peft_model(model, peft.LoraConfig(target_modules=["lm_head"]))

    with pytest.raises(
        ValueError, match="the student has a prompt-learning adapter, expected one of weights"
    ):
        grpo(tmp_path, [teacher(1)], prompted)
    with pytest.raises(ValueError, match=r"teacher .* has a prompt-learning adapter"):
        grpo(tmp_path, [prompted(teacher(1))])
    with pytest.raises(ValueError, match=r"teacher .* has an adapter on its head, expected none there"):
        grpo(tmp_path, [on_the_head(teacher(1))])


def mixture_of_experts(model: Any) -> Any:
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    config = Qwen2MoeConfig(
        vocab_size=model.config.vocab_size,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=2,
        num_experts_per_tok=1,
        router_aux_loss_coef=0.01,
    )
    made = Qwen2MoeForCausalLM(config)
    made.config._name_or_path = "mixture"
    return made


def test_an_auxiliary_loss_is_refused_and_not_dropped(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"router_aux_loss_coef is 0.01, expected 0 for a mixture"):
        grpo(tmp_path, [teacher(1)], mixture_of_experts)
    grpo(tmp_path, [teacher(1)], mixture_of_experts, router_aux_loss_coef=0.0)


@pytest.mark.parametrize("what", ["distillation", "grpo"])
def test_in_bf16_it_is_trls_up_to_rounding(tmp_path: Path, what: str) -> None:
    ours, theirs = pair(what, tmp_path, lambda model: model.to(torch.bfloat16))
    inputs = completions(ours) | {"advantages": ADVANTAGES}
    (loss, gradients), (expected, expected_gradients) = (
        loss_and_gradients(trainer, inputs) for trainer in (ours, theirs)
    )
    torch.testing.assert_close(loss.float(), expected.float(), rtol=2e-2, atol=1e-3)
    for name, gradient in expected_gradients.items():
        off = (gradients[name] - gradient).float().norm() / gradient.float().norm()
        assert off < 5e-2, (name, float(off))


@pytest.mark.parametrize(
    ("autocast", "head"), [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)]
)
def test_only_bf16_autocast_reaches_the_head(
    tmp_path: Path, autocast: torch.dtype, head: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = distillation(tmp_path, [teacher(1)])
    monkeypatch.setattr(trainer.accelerator, "autocast", lambda: torch.autocast("cpu", dtype=autocast))
    seen = completions_of(completions(trainer))
    assert trainer._hidden(trainer.model, seen).dtype == head
    assert trainer._hidden(trainer.model, seen, True).dtype == torch.float32
