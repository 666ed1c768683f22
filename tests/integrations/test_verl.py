"""verl's distillation through smopd.integrations.verl.

Against verl's own functions where the two coincide, smopd.ops elsewhere. Needs verl 0.9.1, in an environment
of its own: make test-verl.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

if find_spec("verl") is None:
    pytest.skip(
        "verl is not installed: make test-verl runs these in its environment", allow_module_level=True
    )

from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass

from smopd.integrations import verl as smopd_verl
from smopd.integrations import verl_host, verl_loss
from smopd.ops import topk_forward_kl
from tests.integrations.tiny_verl import (
    ACTOR,
    N,
    V,
    data_of,
    distillation,
    host_config,
    logits,
    loss_of,
    nested,
    our_config,
    predicting_responses,
    top,
)


@pytest.mark.parametrize("floor", [None, -10.0, -4.0], ids=["no floor", "floor -10", "floor -4"])
def test_verls_own_top_k_loss_keeps_its_values_and_gradient(floor: float | None) -> None:
    ids, logps = top(1)
    results = []
    for function in (verl_host.ORIGINALS["compute_forward_kl_topk"], verl_loss.compute_forward_kl_topk):
        student = logits()
        config = distillation(SimpleNamespace(log_prob_min_clamp=floor))
        columns = function(student, nested(logps), nested(ids), config, "thd")
        weights = torch.linspace(0.5, 2.0, N)
        (grad,) = torch.autograd.grad((columns["distillation_losses"] * weights).sum(), student)
        results.append({**columns, "grad": grad})
    theirs, ours = results
    assert theirs.keys() == ours.keys()
    for name in theirs:
        torch.testing.assert_close(
            ours[name], theirs[name], rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_one_teacher_without_tail_is_verls_loss_without_its_clamp() -> None:
    """Through verl's distillation_ppo_loss. verl clamps a negative token at 0, and its gradient with it."""
    ids, logps = top(1)
    student = logits()
    with torch.no_grad():  # with more mass on the support than the teacher has there
        student[0, ::2] = student[0, ::2].scatter(1, ids[::2].long(), 12 + logps[::2])
    per_token = topk_forward_kl(student[0], ids[:, 0], ids, logps)[1]
    mask = predicting_responses()
    assert (per_token[mask] < 0).any() and (per_token[mask] > 0).any()
    ours, metrics = loss_of(our_config(tail=False), data_of(ids, logps), student)
    theirs, _ = loss_of(host_config(), data_of(ids, logps), student)
    torch.testing.assert_close(ours, per_token[mask].mean(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(theirs, per_token[mask].clamp(min=0).mean(), rtol=1e-5, atol=1e-6)
    assert metrics["distillation/negative_share"] == pytest.approx(
        (per_token[mask] < 0).float().mean().item()
    )
    (our_grad,) = torch.autograd.grad(ours, student)
    (their_grad,) = torch.autograd.grad(theirs, student)
    positive, negative = mask & (per_token > 0), mask & (per_token < 0)
    torch.testing.assert_close(our_grad[0, positive], their_grad[0, positive], rtol=1e-5, atol=1e-6)
    assert not their_grad[0, negative].any() and our_grad[0, negative].abs().sum(-1).gt(0).all()
    assert not our_grad[0, ~mask].any()


@pytest.mark.parametrize("stored", [float, lambda t: torch.full((2,), t)], ids=["a number", "a tensor"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_student_and_teachers_are_at_temperature_one(temperature: float, stored: Any) -> None:
    """verl's engine divides the student's logits by the rollout's temperature before the loss."""
    ids, logps = top(1)
    student = logits()
    columns = verl_loss.compute_topk_loss(
        ACTOR,
        distillation(our_config()),
        data_of(ids, logps, stored(temperature)),
        student / temperature,
        "thd",
    )
    expected = topk_forward_kl(student[0], ids[:, 0], ids, logps, tail=True)[1]
    torch.testing.assert_close(columns["distillation_losses"][0], expected, rtol=1e-5, atol=1e-5)
    on_support = student[0].log_softmax(-1).gather(1, ids).exp().sum(-1)
    torch.testing.assert_close(columns["student_mass"][0], on_support, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(columns["teacher_mass"][0], logps.exp().sum(-1), rtol=1e-5, atol=1e-5)


def test_several_temperatures_are_refused() -> None:
    ids, logps = top(1)
    data = data_of(ids, logps, torch.tensor([1.0, 0.5]))
    with pytest.raises(ValueError, match=r"temperatures are \[0.5, 1.0\], expected one for the batch"):
        verl_loss.compute_topk_loss(ACTOR, distillation(our_config()), data, logits(), "thd")


class InPlaceCrossEntropy(torch.autograd.Function):
    """flash-attn's, as far as it matters: its backward writes over the logits, and no version tells."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, inplace_backward: bool) -> Tensor:
        ctx.save_for_backward(logits, labels)
        ctx.inplace = inplace_backward
        return -logits.log_softmax(-1).gather(1, labels[:, None])[:, 0]

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None, None]:
        logits, labels = ctx.saved_tensors
        gradient = logits.softmax(-1)
        gradient[torch.arange(len(labels)), labels] -= 1
        gradient *= grad_N[:, None]
        if ctx.inplace:
            logits.data.copy_(gradient)
        return gradient, None, None


@pytest.mark.parametrize("loss_mode", [verl_loss.LOSS_MODE, "forward_kl_topk"])
@pytest.mark.parametrize("protected", [True, False], ids=["ours", "verl's own"])
def test_an_in_place_backward_beside_it_leaves_the_gradient(
    loss_mode: str, protected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With task rewards verl's engine takes log-probabilities of the same logits after the loss."""
    monkeypatch.setattr(verl_host.torch_functional, "FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE", True)
    cross_entropy = lambda logits, labels, inplace_backward: (  # noqa: E731
        InPlaceCrossEntropy.apply(logits, labels, inplace_backward),
        None,
    )
    monkeypatch.setattr(verl_host.torch_functional, "cross_entropy_loss", cross_entropy, raising=False)
    engine = import_module("verl.workers.engine.fsdp.transformer_impl")
    assert engine.logprobs_from_logits is verl_loss.logprobs_from_logits
    of_logits = verl_loss.logprobs_from_logits if protected else verl_host.ORIGINALS["logprobs_from_logits"]
    config = our_config() if loss_mode == verl_loss.LOSS_MODE else host_config()
    (ids, logps), labels = top(1), torch.arange(N) % V

    def gradients(inplace: bool) -> Tensor:
        leaf = logits()
        student = (leaf * 1.0)[0]
        data = data_of(ids, logps)
        columns = verl_host.losses.compute_topk_loss(
            ACTOR, distillation(config), data, student[None], data_format="thd"
        )
        logp_N = of_logits(logits=student, labels=labels, inplace_backward=inplace)
        (columns["distillation_losses"].sum() - logp_N.sum()).backward()
        assert leaf.grad is not None
        return leaf.grad

    expected, beside = gradients(False), gradients(True)
    if protected:
        torch.testing.assert_close(beside, expected, rtol=1e-6, atol=1e-7)
    else:
        assert not torch.allclose(beside, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("loss_mode", [verl_loss.LOSS_MODE, "forward_kl_topk"])
def test_a_teacher_of_another_vocabulary_is_refused(loss_mode: str) -> None:
    ids, logps = top(1)
    ids = ids.clone()
    ids[3, 2] = V
    config = our_config() if loss_mode == verl_loss.LOSS_MODE else host_config()
    with pytest.raises(ValueError, match=rf"names tokens 0 to {V}, expected ids in \[0, {V}\)"):
        loss_of(config, data_of(ids, logps), logits())


def test_what_would_clamp_or_shard_is_refused() -> None:
    ids, logps = top(1)
    with pytest.raises(ValueError, match=r"distillation_loss.loss_max_clamp is 10.0, expected None"):
        our_config(loss_max_clamp=10.0)
    with pytest.raises(ValueError, match=r"distillation_loss.use_policy_gradient is True, expected False"):
        our_config(use_policy_gradient=True)
    plain = host_config(loss_mode=verl_loss.LOSS_MODE, log_prob_min_clamp=-10.0)
    with pytest.raises(ValueError, match=r"distillation_loss.log_prob_min_clamp is -10.0, expected None"):
        loss_of(plain, data_of(ids, logps), logits())
    megatron = SimpleNamespace(strategy="megatron")
    with pytest.raises(NotImplementedError, match="strategy megatron shards"):
        verl_loss.compute_topk_loss(
            megatron, distillation(our_config()), data_of(ids, logps), logits(), "thd"
        )
    with pytest.raises(ValueError, match="use_fused_kernels=false"):
        verl_loss.unclamped_forward_kl(ACTOR, distillation(our_config()), {}, data_of(ids, logps))


def test_verls_configuration_takes_the_mixtures_settings() -> None:
    config = omega_conf_to_dataclass(
        OmegaConf.create(
            {
                "_target_": "smopd.integrations.verl.SmopdLossConfig",
                "loss_mode": "smopd_forward_kl",
                "topk": 16,
                "teacher_weights": {"openai/gsm8k": 0.25, "code": 0.75},
                "tail": False,
            }
        )
    )
    assert isinstance(config, smopd_verl.SmopdLossConfig) and config.loss_settings.use_topk
    assert dict(config.teacher_weights) == {"openai/gsm8k": 0.25, "code": 0.75} and not config.tail
