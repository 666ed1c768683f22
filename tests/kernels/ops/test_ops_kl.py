"""topk_forward_kl and teacher_forward_kl: through autograd in float64, and what the divergence promises."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from bench.harness import objective
from smopd.ops import teacher_forward_kl, teacher_mixture, topk_forward_kl
from tests.kernels import float64

N, V = 6, 23


def dense(logits, tokens, ids, logps, tail: bool, temperature: float):
    logq = (logits.double() / temperature).log_softmax(-1)
    return logq[torch.arange(len(logq)), tokens], objective.forward_kl(logq, ids, logps, tail)[0]


def target(kind: str):
    ids, logps = float64.random_topk(N, V, 5, seed=7)
    if kind == "repeats":
        ids = torch.cat([ids, ids[:, :3]], 1)
        logps = torch.cat([logps, logps[:, :3] - 1.0], 1) - math.log(2.0)
    elif kind == "empty slots":
        logps = logps.masked_fill(torch.tensor([False, True, False, True, False]), -torch.inf)
        ids = torch.where(logps == -torch.inf, 0, ids)
    elif kind == "empty row":
        logps = logps.clone()
        logps[2] = -torch.inf
    elif kind == "full":
        logps = logps.new_zeros(N, V) + torch.randn(N, V, dtype=torch.float64).log_softmax(-1)
        ids = torch.arange(V).expand(N, V)
    elif kind == "mass above one":
        logps = logps + 1.0
    elif kind == "none":
        ids, logps = ids[:, :0], logps[:, :0]
    return ids, logps


KINDS = ["plain", "repeats", "empty slots", "empty row", "full", "mass above one", "none"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tail", [False, True], ids=["truncated", "tail"])
@pytest.mark.parametrize("temperature", [1.0, 0.7], ids=["T1", "T0.7"])
def test_values_and_gradients(kind: str, tail: bool, temperature: float) -> None:
    torch.manual_seed(0)
    logits = (2 * torch.randn(N, V, dtype=torch.float64)).requires_grad_()
    tokens = torch.randint(0, V, (N,))
    ids, logps = target(kind)
    options = {"tail": tail, "temperature": temperature}
    logp, kl = topk_forward_kl(logits, tokens, ids, logps, **options)
    want_logp, want_kl = dense(logits, tokens, ids, logps, tail, temperature)
    torch.testing.assert_close(logp, want_logp, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(kl, want_kl, rtol=1e-12, atol=1e-12)
    weight_logp, weight_kl = torch.randn(2, N, dtype=torch.float64)
    got = torch.autograd.grad((weight_logp * logp + weight_kl * kl).sum(), logits)[0]
    want = torch.autograd.grad((weight_logp * want_logp + weight_kl * want_kl).sum(), logits)[0]
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    call = functools.partial(topk_forward_kl, token_ids_N=tokens, target_ids_NS=ids, target_logps_NS=logps)
    assert torch.autograd.gradcheck(functools.partial(call, **options), logits, **float64.ALL_AT_ONCE)


@pytest.mark.parametrize("merge", [False, True], ids=["pooled", "merged"])
@pytest.mark.parametrize("tail", [False, True], ids=["truncated", "tail"])
def test_teachers_equal_their_mixture(merge: bool, tail: bool) -> None:
    torch.manual_seed(2)
    logits = torch.randn(N, V, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(0, V, (N,), dtype=torch.int32)
    ids, logps = float64.random_teachers(N, 3, V, 6, seed=4)
    log_alpha = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).log()
    mixture = teacher_mixture(ids, logps, log_alpha, 9, merge=merge)
    options = {"tail": tail, "temperature": 0.8}
    got = teacher_forward_kl(logits, tokens, ids, logps, log_alpha, 9, merge=merge, **options)
    want = topk_forward_kl(logits, tokens, mixture.ids_NS, mixture.logps_NS, **options)
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=1e-14, atol=1e-15)  # summed in another order
    grads = [torch.autograd.grad(kl.sum(), logits)[0] for _, kl in (got, want)]
    torch.testing.assert_close(*grads, rtol=1e-13, atol=1e-16)


def test_kappa_above_the_union_changes_nothing() -> None:
    torch.manual_seed(3)
    logits = torch.randn(N, V, dtype=torch.float64)
    tokens = torch.zeros(N, dtype=torch.int64)
    teachers = (
        *float64.random_teachers(N, 2, V, 4, seed=5),
        torch.zeros(2, dtype=torch.float64) - math.log(2),
    )
    for tail in (False, True):
        exact = teacher_forward_kl(logits, tokens, *teachers, 8, merge=True, tail=tail)[1]
        more = teacher_forward_kl(logits, tokens, *teachers, 64, merge=True, tail=tail)[1]
        torch.testing.assert_close(exact, more, rtol=1e-14, atol=1e-14)


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


@pytest.mark.parametrize("tail", [False, True], ids=["truncated", "tail"])
def test_minus_inf_student_logits(tail: bool) -> None:
    logits = torch.tensor([[0.0, -torch.inf, 1.0], [0.0, -torch.inf, 1.0]], requires_grad=True)
    ids = torch.tensor([[0, 2], [0, 1]])
    logps = torch.tensor([[0.4, 0.4], [0.4, 0.4]]).log()
    logp, kl = topk_forward_kl(logits, torch.tensor([1, 0]), ids, logps, tail=tail)
    assert logp[0] == -torch.inf and kl[1] == torch.inf
    assert math.isinf(kl[0].item()) == tail  # with the tail, q_r > 0 meets a student without mass there
    grad = torch.autograd.grad(kl.sum(), logits)[0]
    assert bool(grad.isfinite().all())
    if not tail:
        p = torch.tensor([1 / (1 + math.e), 0.0, math.e / (1 + math.e)])
        torch.testing.assert_close(grad, 0.8 * p - torch.tensor([[0.4, 0, 0.4], [0.4, 0.4, 0]]))


def test_only_one_of_the_outputs_used_and_second_order_refused() -> None:
    logits = torch.randn(N, V, dtype=torch.float64, requires_grad=True)
    ids, logps = target("plain")
    tokens = torch.zeros(N, dtype=torch.int64)
    logp, kl = topk_forward_kl(logits, tokens, ids, logps)
    only = torch.autograd.grad(logp.sum(), logits, retain_graph=True)[0]
    want = torch.nn.functional.one_hot(tokens, V) - logits.detach().softmax(-1)
    torch.testing.assert_close(only, want)
    upstream = torch.ones(N, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad((upstream * kl).sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_no_rows() -> None:
    logits = torch.zeros(0, V, requires_grad=True)
    logp, kl = topk_forward_kl(logits, torch.zeros(0, dtype=torch.int64), *(t[:0] for t in target("plain")))
    assert logp.shape == kl.shape == (0,)
    assert torch.autograd.grad(kl.sum(), logits)[0].shape == (0, V)
