"""TRL's trainers with teachers compared with TRL's own, with settings that make them equal; refusals."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl", reason="needs trl (the trl extra)")

from transformers import AutoModelForCausalLM
from trl import DistillationConfig, DistillationTrainer, GRPOConfig, GRPOTrainer

from smopd import ops
from smopd.advantages import ESTIMATORS
from smopd.config.settings import Advantage
from smopd.integrations.trl import SMOPDDistillationTrainer, SMOPDGRPOTrainer, advantages_of, completions_of
from smopd.ops import LossSettings, LossTokens, gd2po_advantages, gdpo_advantages, smopd_loss, topk_logprobs
from smopd.worlds.models import world_tokenizer
from smopd.worlds.toy_world import vocabulary
from tests.integrations.tiny_trl import (
    ADVANTAGES,
    LONGEST,
    PROMPTS,
    assert_same_gradients,
    completions,
    distillation,
    grpo,
    hosts_own,
    lengths,
    lora,
    loss_and_gradients,
    saved_teacher,
    settings,
    teacher,
    vowels,
    with_old_logps,
)


def pair(what: str, folder: Path, student: Any = None, **options: Any) -> tuple[Any, Any]:
    """Return SMOPD's trainer, with settings that make it equal to TRL's, and TRL's."""
    if what == "grpo":
        teachers = [teacher(1)] if student else []  # a coefficient of 0 needs none
        ours = grpo(folder / "ours", teachers, student, opd_coef=0.0, **options)
        args = GRPOConfig(**settings(folder / "theirs", num_generations=2, **options))
        return ours, hosts_own(GRPOTrainer, args, [lengths, vowels], student=student)
    size = teacher(1).config.vocab_size
    ours = distillation(folder / "ours", [teacher(1)], student, kappa=size, tail=False, **options)
    args = DistillationConfig(**settings(folder / "theirs", beta=0.0, **options))
    return ours, hosts_own(DistillationTrainer, args, teacher(1), student=student)


def without_a_tools_tokens(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    tool_mask = torch.ones_like(inputs["completion_mask"])
    tool_mask[:, 1] = 0
    counted = (inputs["completion_mask"] * tool_mask).sum().float()
    return inputs | {"tool_mask": tool_mask, "num_items_in_batch": counted}


def weighted(width: int) -> Any:
    """Add vLLM's importance weights, per sequence or per token."""
    ratio = 2 * torch.rand(4, width, generator=torch.Generator().manual_seed(4))
    return lambda inputs: inputs | {"importance_sampling_ratio": ratio}


CASES: dict[str, dict[str, Any]] = {
    "distillation": {},
    "distillation-temperature": {"temperature": 0.7},
    "distillation-lora": {"student": lora},
    "distillation-tools": {"change": without_a_tools_tokens},
    "grpo-dapo": {"loss_type": "dapo"},
    "grpo-grpo": {"loss_type": "grpo", "epsilon_high": 0.3},
    "grpo-bnpo": {"loss_type": "bnpo", "entropy_coef": 0.01},
    "grpo-dr_grpo": {"loss_type": "dr_grpo", "temperature": 0.7, "delta": 1.5},
    "grpo-lora": {"student": lora},
    "grpo-tools": {"change": without_a_tools_tokens},
    "grpo-weighted-sequences": {"change": weighted(1)},
    "grpo-weighted-tokens": {"change": weighted(LONGEST)},
}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_trls(tmp_path: Path, case: str) -> None:
    options = dict(CASES[case])
    change = options.pop("change", None)
    ours, theirs = pair(case.partition("-")[0], tmp_path, **options)
    plain = with_old_logps(ours, completions(ours)) | {"advantages": ADVANTAGES}
    inputs = change(plain) if change else plain
    theirs.use_vllm = "importance_sampling_ratio" in inputs  # otherwise its loss ignores the weights
    loss, gradients = loss_and_gradients(ours, inputs)
    expected, expected_gradients = loss_and_gradients(theirs, inputs)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-7)
    assert gradients.keys() == expected_gradients.keys() and gradients
    assert_same_gradients(gradients, expected_gradients)
    if change:
        assert abs(loss - loss_and_gradients(ours, plain)[0]) > 1e-3


@pytest.mark.parametrize("what", ["distillation", "grpo"])
def test_whole_runs_with_accumulation_and_evaluation_are_trls(tmp_path: Path, what: str) -> None:
    """Two micro-batches per step. Equal students sample equal completions with the same seed."""
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


@pytest.mark.parametrize("fp32_head", [False, True], ids=["bf16 head", "fp32 head"])
def test_under_autocast_the_head_is_trls(tmp_path: Path, fp32_head: bool) -> None:
    """TRL's defaults, fp32 weights and bf16=True, give an unchanged student a ratio of 1."""
    options = {"bf16": True, "loss_type": "bnpo", "cast_lm_head_to_fp32": fp32_head}
    ours, theirs = pair("grpo", tmp_path, **options)
    inputs = completions(ours) | {"advantages": ADVANTAGES}
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    with torch.no_grad():
        scored = theirs._get_per_token_logps_and_entropies(theirs.model.train(), ids, mask, LONGEST)
    inputs["old_per_token_logps"] = scored[0]
    loss, gradients = loss_and_gradients(ours, inputs)
    expected, expected_gradients = loss_and_gradients(theirs, inputs)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-7)
    for name, gradient in expected_gradients.items():
        off = (gradients[name] - gradient).norm() / gradient.norm()
        assert off < 2e-2, (name, float(off))


@pytest.mark.parametrize("tail", [True, False], ids=["tail", "no tail"])
@pytest.mark.parametrize("merge", [True, False], ids=["merged", "pooled"])
def test_grpo_with_two_teachers_is_smopd_loss(tmp_path: Path, merge: bool, tail: bool) -> None:
    """Computed from whole logits, for the first of two micro-batches."""
    shared = {"opd_coef": 0.7, "kappa": 5, "merge": merge, "tail": tail, "entropy_coef": 0.01}
    shared |= {"temperature": 0.9, "kl_temperature": 0.6}
    options = {"loss_type": "bnpo", "epsilon_high": 0.3, "teacher_weights": [0.75, 0.25]}
    trainer = grpo(tmp_path, [teacher(1), teacher(2)], **shared, **options)
    inputs = with_old_logps(trainer, completions(trainer)) | {"advantages": ADVANTAGES}
    loss, gradients = loss_and_gradients(trainer, inputs)
    counted = inputs["completion_mask"].bool()
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)

    def logits_of(model: Any) -> Tensor:
        return model(input_ids=ids, attention_mask=mask).logits[:, -LONGEST - 1 : -1][counted]

    with torch.no_grad():
        tops = [topk_logprobs(logits_of(model), 5, temperature=0.6) for model in trainer.teacher_models]
    weight_N = torch.full((int(counted.sum()),), 1 / (2 * float(counted.sum())))
    tokens = LossTokens(
        token_ids_N=inputs["completion_ids"][counted],
        adv_N=ADVANTAGES[:, None].expand_as(counted)[counted],
        old_logp_N=inputs["old_per_token_logps"][counted],
        **dict.fromkeys(("pg_weight_N", "kl_weight_N", "ent_weight_N"), weight_N),
        teacher_ids_NMS=torch.stack([top.ids_NS for top in tops], 1),
        teacher_logps_NMS=torch.stack([top.logps_NS for top in tops], 1),
        log_alpha=torch.tensor([0.75, 0.25]).log(),
    )
    trainer.model.zero_grad()
    expected, _ = smopd_loss(logits_of(trainer.model), tokens, LossSettings(clip_high=0.3, **shared))
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-7)
    assert_same_gradients(gradients, {name: p.grad for name, p in trainer.model.named_parameters()})


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


def scored(trainer: Any, *columns: list[float]) -> dict:
    """Return a rollout batch of two groups of two with these rewards."""
    trainer.reward_funcs = [lambda column=column, **_: column for column in columns]
    trainer.model.train()
    return trainer._generate_and_score_completions([dict(PROMPTS[i // 2]) for i in range(4)])


@pytest.mark.parametrize(
    ("estimator", "options", "over"),
    [
        ("gdpo", {}, "responses"),
        ("gdpo", {"whiten": "tokens"}, "tokens"),
        ("gd2po", {}, "tokens"),
        ("batch_balanced", {}, "responses"),
        ("saw", {}, "responses"),
    ],
)
def test_advantages_are_ours_over_all_responses(
    tmp_path: Path, estimator: str, options: dict, over: str | None
) -> None:
    weights = [0.9, 0.1]
    trainer = grpo(tmp_path, [teacher(1)], advantage_estimator=estimator, reward_weights=weights, **options)
    batch = scored(trainer, [1.0, 0.0, 2.0, 3.0], [0.0, 1.0, 0.5, 0.7])
    options = {"weights_K": torch.tensor(weights), "lengths_R": batch["completion_mask"].sum(1)}
    given = (trainer._rewards_RK, torch.tensor([0, 0, 1, 1]))
    if estimator == "gd2po":
        expected, kept = gd2po_advantages(*given, **options, whiten=over)
        assert kept.tolist() == [False, False, True, True]
    elif estimator == "gdpo":
        expected = gdpo_advantages(*given, **options, whiten=over)
    else:
        options |= {"low_K": torch.full((2,), torch.nan), "process_group": None}
        expected, _ = ESTIMATORS[estimator](*given, settings=Advantage(whiten=over), **options)
    torch.testing.assert_close(batch["advantages"], expected)
    assert list(trainer._logs["advantages"]) == expected.tolist()


def test_a_teacher_is_asked_once_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, asked = grpo(tmp_path, [teacher(1)], num_iterations=3, steps_per_generation=1), []
    ask = type(trainer)._topk
    monkeypatch.setattr(type(trainer), "_topk", lambda *given: asked.append(1) or ask(*given))
    trainer.train()
    assert len(asked) == 1


@pytest.mark.parametrize("by_path", [False, True], ids=["padded rows", "more tokens, and the student's rows"])
def test_tokens_that_the_student_has_not_are_left_out(tmp_path: Path, by_path: bool) -> None:
    """For example Qwen's padded rows, or <think> of a Qwen3 teacher with a Qwen2.5 student."""
    more, size = teacher(1), teacher(1).config.vocab_size

    def padded(model: Any) -> Any:
        model.resize_token_embeddings(size + 3)
        return model

    padded(more)
    with torch.no_grad():
        more.get_output_embeddings().weight[size:] = more.get_output_embeddings().weight[:3] * 2
    if by_path:
        more.save_pretrained(tmp_path / "more")
        world_tokenizer([*vocabulary(), "<think>"]).save_pretrained(tmp_path / "more")
    given = tmp_path / "more" if by_path else more
    trainer = distillation(tmp_path, [given], padded if by_path else None, kappa=size + 3, tail=False)
    inputs = completions(trainer)
    heard = trainer.teachers_topk(inputs, completions_of(inputs), 1.0)
    assert int(heard["teacher_ids_NMS"].max()) < size
    assert (heard["teacher_logps_NMS"].isneginf().sum(-1) == 3).all()
    assert math.isfinite(loss_and_gradients(trainer, inputs)[0])


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


def tied(model: Any) -> Any:
    model.config.tie_word_embeddings = True
    model.tie_weights()
    return model.bfloat16()


def test_a_teacher_from_a_path_has_the_students_dtype_and_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fp32 head of a student with tied embeddings does not count."""
    limits, topk = [], ops.linear_topk_logprobs

    def limited(*given: Any, **named: Any) -> Any:
        limits.append(named["chunk_bytes"])
        return topk(*given, **named)

    monkeypatch.setattr(ops, "linear_topk_logprobs", limited)
    path = str(saved_teacher(tmp_path / "teacher"))
    trainer = grpo(tmp_path, [path], tied, cast_lm_head_to_fp32=True, chunk_bytes=4096)
    assert trainer.model.dtype == torch.float32 and trainer.teacher_models[0].dtype == torch.bfloat16
    loss_and_gradients(trainer, completions(trainer) | {"advantages": ADVANTAGES})
    assert limits == [4096]


def with_config(**entries: object) -> Any:
    """Return a function that sets entries of a model's config."""

    def change(model: Any) -> Any:
        model.config.update(entries)
        return model

    return change


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
    for entries, message in (
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0, expected none"),
        ({"output_router_logits": True, "router_aux_loss_coef": 0.01}, "is 0.01, expected 0 for a mixture"),
    ):
        with pytest.raises(ValueError, match=message):
            grpo(tmp_path, [teacher(1)], with_config(**entries))


def test_advantages_have_the_groups_of_an_evaluation_and_the_lengths_of_the_policy() -> None:
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=False),
        num_generations=4,
        num_generations_eval=2,
        args=SimpleNamespace(whiten="tokens", advantage_estimator="gdpo"),
        reward_weights=torch.ones(1),
        accelerator=SimpleNamespace(gather=lambda lengths_B: lengths_B),
    )
    rewards_RK, masks = torch.tensor([[0.0], [1.0], [2.0], [5.0]]), torch.ones(2, 4, 3)
    masks[1, 0, :2] = masks[1, 3, 0] = 0.0
    found = advantages_of(trainer, {"completion_mask": masks[0], "tool_mask": masks[1]}, rewards_RK)
    lengths_R, group_R = torch.tensor([1.0, 3.0, 3.0, 2.0]), torch.tensor([0, 0, 1, 1])
    assert found.equal(gdpo_advantages(rewards_RK, group_R, lengths_R=lengths_R, whiten="tokens"))
