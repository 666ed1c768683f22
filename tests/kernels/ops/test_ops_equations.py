"""The paper's reverse KL, Eq. 15 to 17, on a vocabulary of seven."""

import pytest
import torch

from smopd.ops import LossSettings, LossTokens, smopd_loss

V = 7


@pytest.mark.parametrize("surrogate", ["paper", "ppo"])
@pytest.mark.parametrize("opd_coef", [1.0, 0.3])
def test_expected_gradient_of_equation_17_is_equation_16(surrogate: str, opd_coef: float) -> None:
    """The expectation is the sum over all tokens, weighted by their probability."""
    torch.manual_seed(2)
    logits = torch.randn(V, dtype=torch.float64)
    teachers = torch.randn(2, V, dtype=torch.float64).log_softmax(-1)
    log_alpha = torch.tensor([0.3, 0.7], dtype=torch.float64).log()
    log_q = (log_alpha[:, None] + teachers).logsumexp(0)  # Eq. 15, over the whole vocabulary
    x = logits.clone().requires_grad_()
    logp, log_old = x.log_softmax(-1), logits.log_softmax(-1)
    expected = torch.autograd.grad((logp.exp() * (logp - log_q)).sum(), x)[0]  # Eq. 16
    tokens = LossTokens(
        token_ids_N=torch.arange(V),
        adv_N=torch.zeros(V, dtype=torch.float64),
        pg_weight_N=torch.zeros(V, dtype=torch.float64),
        old_logp_N=log_old,
        reverse_adv_N=log_q - log_old,
        reverse_weight_N=log_old.exp(),
    )
    settings = LossSettings(reverse_kl_surrogate=surrogate, opd_coef=opd_coef, merge=False, tail=False)
    loss, stats = smopd_loss(x.expand(V, V), tokens, settings)
    got = torch.autograd.grad(loss, x)[0]
    assert (got - opd_coef * expected).abs().max() < 1e-12
    assert not bool(stats.clipped_N.any())
    want_value = (log_old.exp() * (log_old - log_q)).sum()
    torch.testing.assert_close(stats.reverse_loss, want_value)
