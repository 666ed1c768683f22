"""TRL's trainers with several teachers: equal to TRL's own loss where the objectives coincide."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="needs trl (the trl extra)")

from transformers import AutoModelForCausalLM
from trl import DistillationConfig, DistillationTrainer, GRPOConfig, GRPOTrainer

from smopd.integrations.trl_loss import completions_of
from smopd.ops import gd2po_advantages, gdpo_advantages
from smopd.worlds.models import world_tokenizer
from smopd.worlds.toy_world import vocabulary
from tests.integrations.tiny_trl import (
    PROMPTS,
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


def assert_same_training(ours, theirs, inputs: dict) -> None:
    loss, gradients = loss_and_gradients(ours, inputs)
    expected, expected_gradients = loss_and_gradients(theirs, inputs)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-7)
    assert_same_gradients(gradients, expected_gradients)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_one_teacher_on_the_whole_vocabulary_is_trls_forward_kl(tmp_path: Path, temperature: float) -> None:
    size = teacher(1).config.vocab_size
    options = {"kappa": size, "tail": False, "temperature": temperature}
    ours = distillation(tmp_path / "ours", [teacher(1)], **options)
    theirs = hosts_own(
        DistillationTrainer,
        DistillationConfig(**settings(tmp_path / "theirs", beta=0.0, temperature=temperature)),
        teacher(1),
    )
    assert_same_training(ours, theirs, completions(ours))


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "dapo"},
        {"loss_type": "grpo", "epsilon_high": 0.3},
        {"loss_type": "bnpo", "entropy_coef": 0.01},
        {"loss_type": "dr_grpo", "temperature": 0.7, "delta": 1.5},
    ],
    ids=lambda options: options["loss_type"],
)
def test_without_the_teachers_term_it_is_trls_policy_loss(tmp_path: Path, options: dict) -> None:
    ours = grpo(tmp_path / "ours", [teacher(1)], opd_coef=0.0, advantage_estimator="trl", **options)
    args = GRPOConfig(**settings(tmp_path / "theirs", num_generations=2, **options))
    theirs = hosts_own(GRPOTrainer, args, [lengths, vowels])
    inputs = completions(ours)
    inputs["advantages"] = torch.tensor([1.0, -1.0, 0.5, -2.0])
    inputs = with_old_logps(ours, inputs)
    assert_same_training(ours, theirs, inputs)
    region = (trainer._metrics["train"]["clip_ratio/region_mean"][-1] for trainer in (ours, theirs))
    assert math.isclose(*region, abs_tol=1e-6)


def test_the_teachers_term_comes_beside_the_anchor(tmp_path: Path) -> None:
    """Loss and gradients are linear in opd_coef, and at 0 the teachers have no say."""
    taught = {}
    for coef in (0.0, 0.5, 1.0):
        trainer = grpo(tmp_path / str(coef), [teacher(1), teacher(2)], opd_coef=coef, kappa=4)
        inputs = completions(trainer) | {"advantages": torch.tensor([1.0, -1.0, 0.5, -2.0])}
        taught[coef] = loss_and_gradients(trainer, inputs)
    losses = [taught[coef][0] for coef in (0.0, 0.5, 1.0)]
    torch.testing.assert_close(losses[1] * 2, losses[0] + losses[2], rtol=1e-5, atol=1e-7)
    assert losses[2] > losses[0] + 0.01
    name = "model.layers.0.mlp.up_proj.weight"
    none, half, whole = (taught[coef][1][name] for coef in (0.0, 0.5, 1.0))
    torch.testing.assert_close(half * 2, none + whole, rtol=1e-4, atol=1e-7)


def scored(trainer: Any, *columns: list[float]) -> dict:
    """A rollout batch, two groups of two, with these rewards."""
    trainer.reward_funcs = [lambda column=column, **_: column for column in columns]
    trainer.model.train()
    return trainer._generate_and_score_completions([dict(PROMPTS[i // 2]) for i in range(4)])


@pytest.mark.parametrize(
    ("estimator", "options", "over"),
    [
        ("gdpo", {}, "responses"),
        ("gdpo", {"whiten": "tokens"}, "tokens"),
        ("gdpo", {"whiten": None}, None),
        ("gd2po", {}, "tokens"),
        ("gd2po", {"whiten": "responses"}, "responses"),
    ],
)
def test_advantages_are_ours_over_all_responses(
    tmp_path: Path, estimator: str, options: dict, over: str | None
) -> None:
    weights = [0.9, 0.1]
    trainer = grpo(tmp_path, [teacher(1)], advantage_estimator=estimator, reward_weights=weights, **options)
    batch = scored(trainer, [1.0, 0.0, 2.0, 3.0], [0.0, 1.0, 0.5, 0.7])
    rewards, group = trainer._rewards_RK, torch.tensor([0, 0, 1, 1])
    options = {
        "weights_K": torch.tensor(weights),
        "lengths_R": batch["completion_mask"].sum(1),
        "whiten": over,
    }
    expected = gdpo_advantages(rewards, group, **options)
    if estimator == "gd2po":
        expected, kept = gd2po_advantages(rewards, group, **options)
        assert kept.tolist() == [False, False, True, True]
    torch.testing.assert_close(batch["advantages"], expected)
    assert list(trainer._logs["advantages"]) == expected.tolist()


def test_trls_advantages_are_the_anchor_unless_others_are_chosen(tmp_path: Path) -> None:
    batch = scored(grpo(tmp_path, [teacher(1)]), [1.0, 0.0, 2.0, 3.0], [0.0, 0.0, 0.5, 0.7])
    theirs = hosts_own(GRPOTrainer, GRPOConfig(**settings(tmp_path, num_generations=2)), [lengths, vowels])
    expected = scored(theirs, [1.0, 0.0, 2.0, 3.0], [0.0, 0.0, 0.5, 0.7])
    torch.testing.assert_close(batch["advantages"], expected["advantages"], rtol=0, atol=0)


def test_a_teacher_is_asked_once_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, asked = grpo(tmp_path, [teacher(1)], num_iterations=3, steps_per_generation=1), []
    ask = type(trainer)._topk
    monkeypatch.setattr(type(trainer), "_topk", lambda *given: asked.append(1) or ask(*given))
    trainer.train()
    assert len(asked) == 1


def test_teachers_with_a_padded_vocabulary_are_heard_below_the_students(tmp_path: Path) -> None:
    padded = teacher(1)
    size = padded.config.vocab_size
    padded.resize_token_embeddings(size + 7)
    with torch.no_grad():
        padded.get_output_embeddings().weight[size:] = padded.get_output_embeddings().weight[:7] * 1.5
    trainer = distillation(tmp_path, [padded], kappa=16)
    inputs = completions(trainer)
    loss, _ = loss_and_gradients(trainer, inputs)
    heard = trainer.teachers_topk(inputs, completions_of(inputs), 1.0)
    assert math.isfinite(loss)
    assert int(heard["teacher_ids_NMS"].max()) < size
    assert bool(heard["teacher_logps_NMS"].isneginf().any())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "cispo"}, "loss_type is 'cispo', expected 'grpo' or 'bnpo'"),
        ({"beta": 0.1}, "beta is 0.1, expected 0.0"),
        ({"importance_sampling_level": "sequence"}, "importance_sampling_level is 'sequence'"),
        ({"advantage_estimator": "gpdo"}, "advantage_estimator is 'gpdo', expected 'trl' or 'gdpo'"),
        ({"whiten": "rows", "advantage_estimator": "gdpo"}, "whiten is 'rows', expected 'default' or 'resp"),
        ({"whiten": "tokens"}, "whiten is 'tokens', expected 'default': advantage_estimator='trl' has no"),
        (
            {"scale_rewards": "none", "advantage_estimator": "gdpo"},
            "scale_rewards is 'none', expected 'group'",
        ),
        (
            {"multi_objective_aggregation": "normalize_then_sum", "advantage_estimator": "gd2po"},
            "multi_objective_aggregation is 'normalize_then_sum', expected 'sum_then_normalize'",
        ),
        (
            {"delta": 1.2, "epsilon_high": 0.2},
            "delta is 1.2, expected None or above 1 [+] epsilon_high = 1.2",
        ),
        ({"delta": 1.0, "epsilon": 0.1}, "delta is 1.0, expected None or above 1 [+] epsilon_high = 1.1"),
        ({"kappa": -1}, "kappa is -1, expected an integer of at least 0"),
        ({"teacher_weights": [1.0, 2.0]}, r"teacher_weights is \[1.0, 2.0\], expected 1 numbers"),
        ({"teacher_weights": [2.0]}, r"teacher_weights is \[2.0\], expected numbers of at least 0 that sum"),
    ],
)
def test_settings_without_a_place_are_named(tmp_path: Path, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grpo(tmp_path, [teacher(1)], **options)


def test_teachers_that_cannot_serve_are_refused(tmp_path: Path) -> None:
    small = teacher(1)
    small.resize_token_embeddings(9)
    with pytest.raises(ValueError, match="has a vocabulary of 9, expected the student's, of"):
        distillation(tmp_path, [small])
    with pytest.raises(ValueError, match="teacher_models is empty"):
        distillation(tmp_path, [])
    with pytest.raises(ValueError, match=r"another tokenizer than the student: '.*' is token \d+ there"):
        distillation(tmp_path, [str(saved_teacher(tmp_path / "other", vocabulary()[::-1]))])
    with pytest.raises(ValueError, match=r"another tokenizer .*: '.*' is token None there and \d+ here"):
        distillation(tmp_path, [str(saved_teacher(tmp_path / "fewer", vocabulary()[:-1]))])
    with pytest.raises(ValueError, match=r"beta is 0.5, expected 0"):
        distillation(tmp_path, [teacher(1)], beta=0.5)


def saved_teacher(folder: Path, pieces: Sequence[str] | None = None) -> Path:
    teacher(1).save_pretrained(folder)
    world_tokenizer(pieces or vocabulary()).save_pretrained(folder)
    return folder


def test_tokens_that_the_student_has_not_are_left_out(tmp_path: Path) -> None:
    """Below the student's padded rows too, as <think> of a Qwen3 teacher for a Qwen2.5 student."""
    more, size = teacher(1), teacher(1).config.vocab_size
    more.resize_token_embeddings(size + 3)
    with torch.no_grad():
        more.get_output_embeddings().weight[size:] = more.get_output_embeddings().weight[:3] * 2
    more.save_pretrained(tmp_path / "more")
    world_tokenizer([*vocabulary(), "<think>"]).save_pretrained(tmp_path / "more")

    def padded(model: Any) -> Any:
        model.resize_token_embeddings(size + 3)
        return model

    trainer = distillation(tmp_path, [tmp_path / "more"], padded, kappa=size + 3)
    inputs = completions(trainer)
    heard = trainer.teachers_topk(inputs, completions_of(inputs), 1.0)
    assert int(heard["teacher_ids_NMS"].max()) < size
    assert (heard["teacher_logps_NMS"].isneginf().sum(-1) == 3).all()


def test_a_teacher_by_path_is_the_teacher(tmp_path: Path) -> None:
    path = saved_teacher(tmp_path / "teacher")
    losses = []
    for given in (teacher(1), str(path), path):
        trainer = distillation(tmp_path, [given])
        losses.append(loss_and_gradients(trainer, completions(trainer))[0])
    torch.testing.assert_close(losses[1:], [losses[0]] * 2, rtol=1e-6, atol=0)


def test_a_loaded_models_tokenizer_is_compared_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = saved_teacher(tmp_path / "other", vocabulary()[::-1])
    with pytest.raises(ValueError, match=r"has another tokenizer than the student: '.*' is token"):
        distillation(tmp_path, [AutoModelForCausalLM.from_pretrained(path)])
    distillation(tmp_path, [teacher(1)])
    assert "Qwen2ForCausalLM has no tokenizer at hand: only its vocabulary size is compared" in caplog.text
