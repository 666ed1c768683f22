"""The paper's equations on a vocabulary of seven: mixture (5), anchor (10 to 13), reverse KL (15 to 17)."""

from __future__ import annotations

import math

import pytest
import torch

from smopd.ops import (
    LossSettings,
    LossTokens,
    smopd_loss,
    teacher_mixture,
    topk_forward_kl,
)

V = 7
TRUNCATED = {"merge": False, "tail": False}


def student_and_teachers(seed: int = 0):
    torch.manual_seed(seed)
    logits = torch.randn(V, dtype=torch.float64)
    teachers = torch.randn(2, V, dtype=torch.float64).log_softmax(-1)
    log_alpha = torch.tensor([0.3, 0.7], dtype=torch.float64).log()
    return logits, teachers, log_alpha


def test_pooled_repeats_of_agreeing_teachers_give_about_minus_log_m_and_the_right_gradient() -> None:
    """Repeats shift the value by -log M but not the gradient."""
    logits = torch.randn(6, V, dtype=torch.float64, requires_grad=True)
    tokens = torch.zeros(6, dtype=torch.int64)
    logps = logits.detach().log_softmax(-1)
    ids = torch.arange(V).expand(6, 2, V)
    log_alpha = torch.full((2,), -math.log(2.0), dtype=torch.float64)
    teachers = (ids, logps[:, None].expand(6, 2, V), log_alpha)
    mixture = teacher_mixture(*teachers, 2 * V)
    pooled = topk_forward_kl(logits, tokens, mixture.ids_NS, mixture.logps_NS)[1]
    torch.testing.assert_close(pooled, torch.full((6,), -math.log(2.0), dtype=torch.float64))
    assert torch.autograd.grad(pooled.sum(), logits)[0].abs().max() < 1e-14
    mixture = teacher_mixture(*teachers, V, merge=True)
    merged = topk_forward_kl(logits, tokens, mixture.ids_NS, mixture.logps_NS, tail=True)[1]
    assert merged.abs().max() < 1e-14


@pytest.mark.parametrize("tail", [False, True], ids=["truncated", "tail"])
def test_at_p_equal_q_the_opd_gradient_is_zero_and_the_anchor_is_not(tail: bool) -> None:
    torch.manual_seed(1)
    n_tokens = 50
    logits = torch.randn(n_tokens, V, dtype=torch.float64, requires_grad=True)
    q = logits.detach().log_softmax(-1)
    ones = torch.ones(n_tokens, dtype=torch.float64)
    tokens = {
        "token_ids_N": torch.randint(0, V, (n_tokens,)),
        "adv_N": torch.randn(n_tokens, dtype=torch.float64),
        "target_ids_NS": torch.arange(V).expand(n_tokens, V),
        "target_logps_NS": q,
        "kl_weight_N": ones,
    }
    settings = LossSettings(tail=tail)
    opd, stats = smopd_loss(logits, LossTokens(pg_weight_N=0 * ones, **tokens), settings)
    assert abs(opd.item()) < 1e-12 and torch.allclose(stats.student_mass_N, ones)
    assert torch.autograd.grad(opd, logits)[0].abs().max() < 1e-14
    total = torch.autograd.grad(
        smopd_loss(logits, LossTokens(pg_weight_N=ones, **tokens), settings)[0], logits
    )[0]
    anchor = -tokens["adv_N"][:, None] * (
        torch.nn.functional.one_hot(tokens["token_ids_N"], V) - logits.detach().softmax(-1)
    )
    torch.testing.assert_close(total, anchor)
    assert bool((total.norm(dim=-1) > 0).all())


def reverse_kl_gradient(logits: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    x = logits.clone().requires_grad_()
    logp = x.log_softmax(-1)
    return torch.autograd.grad((logp.exp() * (logp - log_q)).sum(), x)[0]


@pytest.mark.parametrize("surrogate", ["paper", "ppo"])
@pytest.mark.parametrize("opd_coef", [1.0, 0.3])
def test_expected_gradient_of_equation_17_is_equation_16(surrogate: str, opd_coef: float) -> None:
    """The expectation is the sum over all tokens, weighted by their probability."""
    logits, teachers, log_alpha = student_and_teachers(2)
    log_q = (log_alpha[:, None] + teachers).logsumexp(0)  # Eq. 15, over the whole vocabulary
    x = logits.clone().requires_grad_()
    log_old = logits.log_softmax(-1)
    tokens = LossTokens(
        token_ids_N=torch.arange(V),
        adv_N=torch.zeros(V, dtype=torch.float64),
        pg_weight_N=torch.zeros(V, dtype=torch.float64),
        old_logp_N=log_old,
        reverse_adv_N=log_q - log_old,
        reverse_weight_N=log_old.exp(),
    )
    settings = LossSettings(reverse_kl_surrogate=surrogate, opd_coef=opd_coef, **TRUNCATED)
    loss, stats = smopd_loss(x.expand(V, V), tokens, settings)
    got = torch.autograd.grad(loss, x)[0]
    assert (got - opd_coef * reverse_kl_gradient(logits, log_q)).abs().max() < 1e-12
    assert not bool(stats.clipped_N.any())
    want_value = (log_old.exp() * (log_old - log_q)).sum()
    torch.testing.assert_close(stats.reverse_loss, want_value)
