"""One update: gradient, fp32 masters and learning rate; log-probabilities equal a plain forward.

That gradients and updates of several ranks equal one process's: tests/smopd/run/test_invariance.py.
"""

import sys
from copy import deepcopy
from functools import partial

import pytest
import torch
import torch.distributed as dist

from smopd.engine.errors import UnusableModel
from smopd.engine.student.fsdp import Fsdp2
from smopd.engine.student.optimizers import cosine, last_share, linear
from smopd.engine.student.student import Student
from tests.engine.models.families import family
from tests.engine.student.training import (
    NLL,
    TOKENS,
    advance,
    equal,
    loss_tokens,
    make_student,
    on_two_ranks,
    parameters,
    settings_of,
)
from tests.engine.tiny import plain_logps, ragged_rollouts, tiny_model


class Rounds(torch.autograd.Function):
    """The identity, but for what a kernel may do to bf16, forward or backward."""

    @staticmethod
    def forward(ctx, value, fault):
        ctx.fault = fault
        return value * torch.nan if fault == "nan" and value.dtype == torch.bfloat16 else value.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.fault == "raises" and grad.dtype == torch.bfloat16:
            raise RuntimeError("no such kernel")
        return grad * torch.inf if ctx.fault == "inf" and grad.dtype == torch.bfloat16 else grad, None


@pytest.mark.parametrize(
    ("fault", "why"),
    [("raises", "no such kernel"), ("nan", "NaN or infinite"), ("inf", "NaN or infinite"), ("", None)],
)
def test_a_model_that_cannot_be_computed_in_bf16_is_refused(device, fault, why):
    model = tiny_model()
    model.model.layers[1].register_forward_hook(lambda module, args, output: Rounds.apply(output, fault))
    if why is None:
        assert Student(model, settings_of(compute_dtype="bfloat16"), device)
        return
    with pytest.raises(UnusableModel, match=f"got bfloat16, in which a Qwen2ForCausalLM fails .*{why}"):
        Student(model, settings_of(compute_dtype="bfloat16"), device)


def test_the_trial_in_bf16_changes_nothing(device, monkeypatch):
    def trained():
        torch.manual_seed(5)
        student = make_student(device, compute_dtype="bfloat16", gradient_checkpointing=True)
        drawn = torch.rand(3)
        assert not student.optimizer.state and all(each.grad is None for each in student.policy.parameters())
        advance(student, range(2))
        return drawn, parameters(student)

    tried = trained()
    monkeypatch.setattr(Student, "_require_computable", lambda self: None)
    drawn, untried = trained()
    assert tried[0].equal(drawn) and equal(tried[1], untried)


def test_an_error_of_another_rank_is_not_the_models(device, monkeypatch):
    monkeypatch.setattr(Fsdp2, "trial", lambda *_: dist.broadcast(torch.ones(1), src=9))
    with pytest.raises((ValueError, RuntimeError)) as error:
        make_student(device, compute_dtype="bfloat16")
    assert not isinstance(error.value, UnusableModel)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"warmup_steps": 4}, [0.0025, 0.005, 0.0075, 0.01, 0.01]),
        ({"schedule": partial(last_share, updates=4, share=0.5)}, [0.01, 0.01, 0.01, 0.005, 0.0]),
    ],
)
def test_the_rate_warms_up_and_decays_to_zero(device, options, expected):
    trained, rates = make_student(device, **options), []
    for _ in range(5):
        advance(trained, range(5, 6))
        rates.append(trained.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx(expected)


def test_schedules() -> None:
    assert [linear(update, 4) for update in (0, 1, 4, 5)] == [1.0, 0.75, 0.0, 0.0]
    assert [cosine(update, 4) for update in (0, 2, 4)] == pytest.approx([1.0, 0.5, 0.0])


def test_a_shard_size_that_does_not_divide_the_ranks_is_refused(device):
    with pytest.raises(ValueError, match="shard_size: got 2, expected a divisor of the 1 ranks"):
        make_student(device, shard_size=2)


def test_compiled_layers_change_nothing(device, monkeypatch):
    """Uses dynamo without inductor, which would take a minute."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    results = []
    for compiled in (False, True):
        trained = make_student(device, compile=compiled)
        advance(trained, range(1))
        results.append((trained.logps(ragged_rollouts(2), 1.0), list(parameters(trained))))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-3, atol=1e-4)
    assert results[0][1] == results[1][1], "names stay those of the model"


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "lfm2_moe"])
def test_the_experts_of_each_micro_batch_are_balanced(device, name):
    """By the family's own loss of its router's logits at the tokens before the responses'."""
    model, rollouts = family(name), ragged_rollouts(3)
    settings = settings_of(router_aux_loss_coef=20.0, max_grad_norm=1e9, micro_batch_tokens=60)
    if name == "lfm2_moe":
        with pytest.raises(UnusableModel, match="got 20, but transformers has no such loss for Lfm2Moe"):
            Student(model, settings, device)
        return
    student = Student(deepcopy(model), settings, device)
    update = student.update(rollouts, loss_tokens(rollouts), NLL)
    (-plain_logps(model, rollouts).sum() / TOKENS).backward(retain_graph=True)
    plain = torch.stack([each.grad.norm() for each in model.parameters()]).norm()
    routed = []
    for rollout in rollouts:
        ids = torch.cat([torch.tensor(rollout.prompt_ids), rollout.response_ids])
        output = model.model(ids[None], output_router_logits=True)
        routed.append(torch.stack(output.router_logits)[:, len(rollout.prompt_ids) - 1 : -1])
    n_tokens = sum(len(rollout.response_ids) for rollout in rollouts)
    balancing = sys.modules[type(model).__module__].load_balancing_loss_func
    for batch in student._micro_batches(rollouts):
        loss = balancing(tuple(torch.cat(routed, 1)[:, batch.flat_N]), num_experts=4, top_k=2)
        (20.0 * loss * len(batch.flat_N) / n_tokens).backward(retain_graph=True)
    expected = torch.stack([each.grad.norm() for each in model.parameters()]).norm()
    assert update.grad_norm == pytest.approx(float(expected), rel=1e-4) and expected > 1.05 * plain


@pytest.mark.slow
def test_fsdp2_on_two_ranks(tmp_path):
    """It resumes bit for bit, skips, offloads, and scores a LoRA student's base."""
    on_two_ranks(tmp_path, "fsdp2")
