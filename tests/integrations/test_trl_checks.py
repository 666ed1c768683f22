"""What TRL's trainers with teachers refuse at construction: configs, split models, bent logits, ZeRO-3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="needs trl (the trl extra)")

from trl import DistillationConfig, GRPOConfig

from smopd.integrations.trl import SMOPDDistillationTrainer, SMOPDGRPOTrainer
from tests.integrations.tiny_trl import distillation, grpo, lengths, settings, teacher


@pytest.mark.parametrize("given", [DistillationConfig, GRPOConfig, None])
def test_trls_own_configs_are_refused(tmp_path: Path, given: Any) -> None:
    args = given and given(**settings(tmp_path, per_device_train_batch_size=8))
    name = type(args).__name__
    with pytest.raises(TypeError, match=f"args is of type {name}, expected SMOPDDistillationConfig"):
        SMOPDDistillationTrainer(teacher(0), [teacher(1)], args)
    with pytest.raises(TypeError, match=f"args is of type {name}, expected SMOPDGRPOConfig"):
        SMOPDGRPOTrainer(teacher(0), lengths, [teacher(1)], args)


def split(model: Any) -> Any:
    model.hf_device_map = {"model": 0, "lm_head": 1}
    return model


def bent(model: Any) -> Any:
    model.config.final_logit_softcapping = 30.0
    return model


@pytest.mark.parametrize("make", [distillation, grpo])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (split, "{} is split by its device_map over 0, 1, expected one device: load it with device_map=None"),
        (bent, "qwen2 has final_logit_softcapping=30.0, expected none"),
    ],
)
def test_models_that_the_loss_cannot_read_are_refused(
    tmp_path: Path, make: Any, change: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message.format("the student")):
        make(tmp_path, [teacher(1)], change)
    with pytest.raises(ValueError, match=message.format("teacher Qwen2ForCausalLM")):
        make(tmp_path, [teacher(1), change(teacher(2))])


def test_a_model_whose_device_map_is_one_device_is_taken(tmp_path: Path) -> None:
    one = teacher(1)
    one.hf_device_map = {"": "cpu"}
    assert len(distillation(tmp_path, [one]).teacher_models) == 1
