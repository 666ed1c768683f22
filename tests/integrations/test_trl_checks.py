"""Settings, teachers and students that the TRL trainers refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="needs trl (the trl extra)")

from transformers import AutoModelForCausalLM

from smopd.integrations.trl import SMOPDDistillationTrainer, SMOPDGRPOTrainer
from smopd.worlds.toy_world import vocabulary
from tests.integrations.tiny_trl import distillation, grpo, lengths, saved_teacher, teacher


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "cispo"}, "loss_type is 'cispo', expected 'grpo' or 'bnpo'"),
        ({"beta": 0.1}, "beta is 0.1, expected 0.0"),
        ({"whiten": "tokens"}, "whiten is 'tokens', expected 'default': advantage_estimator='trl' has no"),
        ({"scale_rewards": "none", "advantage_estimator": "gdpo"}, "is 'none', expected 'group'"),
        ({"delta": 1.2, "epsilon_high": 0.2}, "delta is 1.2, expected None or above 1 [+] eps"),
        ({"kappa": -1}, "kappa is -1, expected an integer of at least 0"),
        ({"teacher_weights": [1.0, 2.0]}, r"teacher_weights is \[1.0, 2.0\], expected 1 numbers"),
        ({"teacher_weights": [2.0]}, r"teacher_weights is \[2.0\], expected numbers of at least 0 that sum"),
        ({"teacher_model_init_kwargs": {"dtype": "auto"}}, "teacher_model_init_kwargs is given"),
    ],
)
def test_settings_without_a_place_are_named(tmp_path: Path, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grpo(tmp_path, [teacher(1)], **options)


def test_trls_own_configs_are_refused() -> None:
    with pytest.raises(TypeError, match="args is of type NoneType, expected SMOPDDistillationConfig"):
        SMOPDDistillationTrainer(teacher(0), [teacher(1)], None)
    with pytest.raises(TypeError, match="args is of type NoneType, expected SMOPDGRPOConfig"):
        SMOPDGRPOTrainer(teacher(0), lengths, [teacher(1)], None)


def test_teachers_that_cannot_serve_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    small = teacher(1)
    small.resize_token_embeddings(9)
    other = saved_teacher(tmp_path / "other", vocabulary()[::-1])
    for teachers, message in (
        ([], "teacher_models is empty"),
        ([small], "has a vocabulary of 9, expected the student's, of"),
        ([str(other)], r"another tokenizer than the student: '.*' is token \d+ of the teacher"),
        ([AutoModelForCausalLM.from_pretrained(other)], r"another tokenizer than the student: '.*' is token"),
    ):
        with pytest.raises(ValueError, match=message):
            distillation(tmp_path, teachers)
    with pytest.raises(ValueError, match=r"beta is 0.5, expected 0"):
        distillation(tmp_path, [teacher(1)], beta=0.5)
    one_device = teacher(1)
    one_device.hf_device_map = {"": "cpu"}
    distillation(tmp_path, [one_device])
    assert "Qwen2ForCausalLM has no local tokenizer: only its vocabulary size is compared" in caplog.text


def capped(model: Any) -> Any:
    model.config.final_logit_softcapping = 30.0
    return model


def test_models_that_the_loss_cannot_read_are_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs peft (the lora extra)")
    split, prompts = teacher(2), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    split.hf_device_map = {"model": 0, "lm_head": 1}
    adapted_head = peft.LoraConfig(target_modules=["lm_head"])
    for given, message in (
        (split, "is split by its device_map over 0, 1, expected one device: load it with device_map=None"),
        (peft.get_peft_model(teacher(2), prompts), "has a prompt-learning adapter, expected one of weights"),
        (peft.get_peft_model(teacher(2), adapted_head), "has an adapter on its head, expected none there"),
    ):
        with pytest.raises(ValueError, match=message):
            distillation(tmp_path, [teacher(1), given])
    with pytest.raises(ValueError, match=r"final_logit_softcapping=30.0, expected none"):
        grpo(tmp_path, [teacher(1)], capped)


def with_an_auxiliary_loss(model: Any) -> Any:
    model.config.update({"output_router_logits": True, "router_aux_loss_coef": 0.01})
    return model


def test_an_auxiliary_loss_is_refused_and_not_dropped(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"router_aux_loss_coef is 0.01, expected 0 for a mixture"):
        grpo(tmp_path, [teacher(1)], with_an_auxiliary_loss)
