"""topk_forward_kl and teacher_forward_kl: through autograd in float64, and what the divergence promises."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from smopd.ops import teacher_forward_kl, topk_forward_kl
from tests.kernels import float64

N, V = 6, 23


def target() -> tuple[torch.Tensor, torch.Tensor]:
    """With repeats and an empty slot."""
    ids, logps = float64.random_topk(N, V, 5, seed=7)
    logps[:, 3] = -torch.inf
    return torch.cat([ids, ids[:, :3]], 1), torch.cat([logps, logps[:, :3] - 1.0], 1) - math.log(2.0)


@pytest.mark.parametrize("tail", [False, True], ids=["truncated", "tail"])
def test_gradcheck(tail: bool) -> None:
    torch.manual_seed(0)
    logits = (2 * torch.randn(N, V, dtype=torch.float64)).requires_grad_()
    arguments = (torch.arange(N), *target())
    call = functools.partial(topk_forward_kl, tail=tail, temperature=0.7)
    assert torch.autograd.gradcheck(lambda x: call(x, *arguments), logits, **float64.ALL_AT_ONCE)


def test_pooled_repeats_of_agreeing_teachers_give_about_minus_log_m_and_the_right_gradient() -> None:
    """SEMANTICS 3.1: the value is wrong by -log M, the gradient is not; and nothing is clamped."""
    logits = torch.randn(N, V, dtype=torch.float64, requires_grad=True)
    tokens = torch.zeros(N, dtype=torch.int64)
    logps = logits.detach().log_softmax(-1)
    ids = torch.arange(V).expand(N, 2, V)
    log_alpha = torch.full((2,), -math.log(2.0), dtype=torch.float64)
    teachers = (ids, logps[:, None].expand(N, 2, V), log_alpha)
    pooled = teacher_forward_kl(logits, tokens, *teachers, 2 * V)[1]
    torch.testing.assert_close(pooled, torch.full((N,), -math.log(2.0), dtype=torch.float64))
    assert torch.autograd.grad(pooled.sum(), logits)[0].abs().max() < 1e-14
    merged = teacher_forward_kl(logits, tokens, *teachers, V, merge=True, tail=True)[1]
    assert merged.abs().max() < 1e-14


def test_tail_is_a_true_kl() -> None:
    torch.manual_seed(5)
    student = (2 * torch.randn(400, 50)).log_softmax(-1)
    near = (student[:, None] + 0.1 * torch.randn(400, 2, 50)).log_softmax(-1)
    logps, ids = near.topk(8, dim=-1)
    half = torch.full((2,), -math.log(2.0))
    tokens = torch.zeros(400, dtype=torch.int64)
    for merge in (False, True):
        kl = teacher_forward_kl(student, tokens, ids, logps, half, 8, merge=merge, tail=True)[1]
        assert float(kl.min()) >= 0.0
    assert float(teacher_forward_kl(student, tokens, ids, logps, half, 8)[1].max()) < 0.0


def test_tail_gradient_follows_the_full_vocabulary_better_than_the_truncated_one() -> None:
    torch.manual_seed(6)
    teacher = (2.5 * torch.randn(200, 400, dtype=torch.float64)).log_softmax(-1)
    logits = (teacher + torch.randn(200, 400, dtype=torch.float64)).requires_grad_()
    logps, ids = teacher.topk(16, dim=-1)
    tokens = torch.zeros(200, dtype=torch.int64)
    full = logits.detach().softmax(-1) - teacher.exp()

    def cosine(tail: bool) -> float:
        kl = topk_forward_kl(logits, tokens, ids, logps, tail=tail)[1]
        grad = torch.autograd.grad(kl.sum(), logits)[0]
        return float(torch.nn.functional.cosine_similarity(grad.flatten(), full.flatten(), dim=0))

    assert cosine(True) > 0.98
    assert 1 - cosine(True) < 0.25 * (1 - cosine(False))


def test_student_mass_off_the_support_far_below_fp32() -> None:
    """p_r = exp(-1000) underflows; its logarithm, the KL and the pull towards the tail do not."""
    logits = torch.tensor([[1000.0, 0.0, 0.0, 0.0]], requires_grad=True)
    args = (torch.tensor([0]), torch.tensor([[0]]), torch.tensor([[math.log(0.9)]]))
    _, kl = topk_forward_kl(logits, *args, tail=True)
    want = 0.9 * math.log(0.9) + 0.1 * (math.log(0.1) + 1000.0 - math.log(3.0))
    assert kl.item() == pytest.approx(want, rel=1e-6)
    grad = torch.autograd.grad(kl.sum(), logits)[0]
    torch.testing.assert_close(grad, torch.tensor([[0.1, -0.1 / 3, -0.1 / 3, -0.1 / 3]]))


def test_tail_mass_below_the_floor_counts_as_nothing() -> None:
    logits = torch.tensor([[0.0, -math.inf]], requires_grad=True)
    logps = torch.tensor([[math.log1p(-(2.0**-22))]])
    _, kl = topk_forward_kl(logits, torch.tensor([0]), torch.tensor([[0]]), logps, tail=True)
    assert kl.item() == pytest.approx(0.0, abs=1e-6)
    assert torch.autograd.grad(kl.sum(), logits)[0].abs().max() < 1e-6


def test_only_one_of_the_outputs_used_and_second_order_refused() -> None:
    logits = torch.randn(N, V, dtype=torch.float64, requires_grad=True)
    ids, logps = target()
    tokens = torch.zeros(N, dtype=torch.int64)
    logp, kl = topk_forward_kl(logits, tokens, ids, logps)
    only = torch.autograd.grad(logp.sum(), logits, retain_graph=True)[0]
    want = torch.nn.functional.one_hot(tokens, V) - logits.detach().softmax(-1)
    torch.testing.assert_close(only, want)
    upstream = torch.ones(N, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad((upstream * kl).sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
