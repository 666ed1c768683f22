"""The paper's appendix as tests: the anchor survives at the imitation ceiling (Eq. 10 to 14), and the sampled
reverse KL has the right gradient on policy (Eq. 15 to 17), by enumeration of a vocabulary of seven.
"""

from __future__ import annotations

import pytest
import torch

from smopd.ops import LossSettings, LossTokens, gdpo_advantages, smopd_loss, topk_forward_kl

V = 7
TRUNCATED = {"merge": False, "tail": False}


def student_and_teachers(seed: int = 0):
    torch.manual_seed(seed)
    logits = torch.randn(V, dtype=torch.float64)
    teachers = torch.randn(2, V, dtype=torch.float64).log_softmax(-1)
    log_alpha = torch.tensor([0.3, 0.7], dtype=torch.float64).log()
    return logits, teachers, log_alpha


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


def test_the_opd_gradient_is_equation_12() -> None:
    logits, teachers, log_alpha = student_and_teachers()
    q = (log_alpha[:, None] + teachers).logsumexp(0)
    x = logits.clone().requires_grad_()
    _, kl = topk_forward_kl(x[None], torch.tensor([0]), torch.arange(V)[None], q[None])
    got = torch.autograd.grad(kl.sum(), x)[0]
    want = torch.autograd.grad(-(q.exp() * x.log_softmax(-1)).sum(), x)[0]
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-15)


def reverse_kl_gradient(logits: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    x = logits.clone().requires_grad_()
    logp = x.log_softmax(-1)
    return torch.autograd.grad((logp.exp() * (logp - log_q)).sum(), x)[0]


@pytest.mark.parametrize("surrogate", ["paper", "ppo"])
@pytest.mark.parametrize("opd_coef", [1.0, 0.3])
def test_expected_gradient_of_equation_17_is_equation_16(surrogate: str, opd_coef: float) -> None:
    """Every token once, weighted by its probability under the policy: the expectation, exactly."""
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


def test_a_differentiated_k3_has_the_forward_kl_gradient_instead() -> None:
    logits, teachers, log_alpha = student_and_teachers(3)
    log_q = (log_alpha[:, None] + teachers).logsumexp(0)
    x = logits.clone().requires_grad_()
    gap = log_q - x.log_softmax(-1)
    k3 = (logits.softmax(-1) * (gap.exp() - gap - 1)).sum()
    got = torch.autograd.grad(k3, x)[0]
    reverse = reverse_kl_gradient(logits, log_q)
    assert (got - reverse).abs().max() > 1e-2
    y = logits.clone().requires_grad_()
    _, kl = topk_forward_kl(y[None], torch.tensor([0]), torch.arange(V)[None], log_q[None])
    torch.testing.assert_close(got, torch.autograd.grad(kl.sum(), y)[0], rtol=1e-12, atol=1e-12)


def test_off_policy_the_printed_form_stops_outside_the_clip_and_ppo_does_not() -> None:
    logits = torch.zeros(1, V, dtype=torch.float64, requires_grad=True)
    logp = logits.detach().log_softmax(-1)[:, 0]
    one = torch.ones(1, dtype=torch.float64)
    grads = {}
    for surrogate in ("paper", "ppo"):
        tokens = LossTokens(
            token_ids_N=torch.tensor([0]),
            adv_N=one,
            pg_weight_N=0 * one,
            old_logp_N=logp + 1.0,  # ratio 0.37, below the clip, with a positive advantage
            reverse_adv_N=one,
            reverse_weight_N=one,
        )
        loss, _ = smopd_loss(logits, tokens, LossSettings(reverse_kl_surrogate=surrogate))
        grads[surrogate] = torch.autograd.grad(loss, logits)[0]
    assert not bool(grads["paper"].any()) and bool(grads["ppo"].any())


def test_eq_14_a_sparse_reward_leaves_the_anchor_silent_in_equal_groups() -> None:
    torch.manual_seed(4)
    group = torch.arange(4000).repeat_interleave(8)
    rewards = (torch.rand(32000, 1) < 0.01).float()
    adv = gdpo_advantages(rewards, group, whiten=None).view(4000, 8)
    rewards = rewards.view(4000, 8)
    mixed = (rewards.amax(1) != rewards.amin(1)).float()
    assert torch.equal((adv != 0).any(1).float(), mixed)
    assert mixed.mean().item() == pytest.approx(1 - 0.01**8 - 0.99**8, rel=0.15)
