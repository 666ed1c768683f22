"""smopd_loss: loss, every statistic and the gradient against dense float64, masks and hostile logits."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch

from smopd.kernels.reference import rows as reference_rows
from smopd.ops import (
    LossSettings,
    LossStats,
    smopd_loss,
    teacher_mixture,
)
from tests.kernels import float64

N, V = 12, 29
SETTINGS = {
    "defaults": LossSettings(),
    "paper": LossSettings(merge=False, tail=False),
    "pooled-tail": LossSettings(merge=False, tail=True, kappa=9),
    "entropy": LossSettings(entropy_coef=0.3, tail=False),
    "entropy-tail": LossSettings(entropy_coef=0.3),
    "two-temperatures": LossSettings(temperature=0.7, entropy_coef=0.2),
    "one-temperature": LossSettings(temperature=0.7, kl_temperature=0.7, tail=False),
    "dual-ppo": LossSettings(dual_clip=1.5, reverse_kl_surrogate="ppo", opd_coef=0.3, clip_high=0.28),
    "no-opd": LossSettings(opd_coef=0.0),
    "kappa-0": LossSettings(kappa=0),
    "kappa-above": LossSettings(kappa=40),
}


def teachers(n_rows: int = N) -> dict[str, torch.Tensor]:
    ids, logps = float64.random_teachers(n_rows, 2, V, 7, seed=3)
    log_alpha = torch.tensor([0.4, 0.6], dtype=torch.float64).log()
    return {"teacher_ids_NMS": ids, "teacher_logps_NMS": logps, "log_alpha": log_alpha}


def logits_and_tokens(settings: LossSettings, seed: int = 0, **more):
    torch.manual_seed(seed)
    logits = (2 * torch.randn(N, V, dtype=torch.float64)).requires_grad_()
    return logits, float64.random_tokens(N, V, logits, settings.temperature, seed, **{**teachers(), **more})


@pytest.mark.parametrize("name", SETTINGS)
def test_loss_statistics_and_gradient(name: str) -> None:
    settings = SETTINGS[name]
    logits, tokens = logits_and_tokens(settings)
    loss, stats = smopd_loss(logits, tokens, settings)
    want, want_stats = float64.loss(logits, tokens, settings)
    torch.testing.assert_close(loss, want, rtol=1e-12, atol=1e-12)
    for key, value in want_stats.items():
        torch.testing.assert_close(
            getattr(stats, key), value, rtol=1e-11, atol=1e-12, msg=lambda m, k=key: f"{k}: {m}"
        )
    got = torch.autograd.grad(loss, logits)[0]
    torch.testing.assert_close(got, torch.autograd.grad(want, logits)[0], rtol=1e-9, atol=1e-12)
    assert torch.autograd.gradcheck(
        lambda x: smopd_loss(x, tokens, settings)[0], logits, **float64.ALL_AT_ONCE
    )


def test_terms_add_up_and_nothing_of_the_statistics_is_differentiable() -> None:
    settings = replace(SETTINGS["entropy-tail"], opd_coef=0.7)
    logits, tokens = logits_and_tokens(settings)
    loss, stats = smopd_loss(logits, tokens, settings)
    total = stats.pg_loss + 0.7 * (stats.kl_loss + stats.reverse_loss) - 0.3 * stats.entropy
    torch.testing.assert_close(loss.detach(), total)
    assert not any(getattr(stats, field.name).requires_grad for field in fields(LossStats))
    assert stats.clipped_N.dtype == torch.int8


@pytest.mark.parametrize("merge", [False, True])
def test_a_given_target_equals_the_teachers(merge: bool) -> None:
    settings = LossSettings(merge=merge, kappa=8)
    logits, tokens = logits_and_tokens(settings)
    mixture = teacher_mixture(
        tokens.teacher_ids_NMS, tokens.teacher_logps_NMS, tokens.log_alpha, 8, merge=merge
    )
    none = dict.fromkeys(("teacher_ids_NMS", "teacher_logps_NMS", "log_alpha"))
    given = replace(tokens, **none, target_ids_NS=mixture.ids_NS, target_logps_NS=mixture.logps_NS)
    losses = [smopd_loss(logits, t, settings)[0] for t in (tokens, given)]
    torch.testing.assert_close(*losses, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(*(torch.autograd.grad(x, logits)[0] for x in losses), rtol=1e-12, atol=1e-15)


def test_a_row_of_log_alpha_per_token_is_cut_with_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, tokens = logits_and_tokens(LossSettings())
    per_token = torch.rand(N, 2, dtype=torch.float64).log()
    tokens = replace(tokens, log_alpha=per_token)
    whole = smopd_loss(logits, tokens)[0]
    torch.testing.assert_close(whole, float64.loss(logits, tokens, LossSettings())[0])
    monkeypatch.setattr(reference_rows, "ROW_CHUNK_BYTES_CPU", 5 * V * 8)
    assert torch.equal(whole, smopd_loss(logits, tokens)[0])


def test_without_old_log_probabilities_the_ratio_is_one_and_has_a_gradient() -> None:
    logits, tokens = logits_and_tokens(LossSettings(), old_logp_N=None)
    loss, stats = smopd_loss(logits, tokens)
    torch.testing.assert_close(stats.pg_loss, -(tokens.pg_weight_N * tokens.adv_N).sum())
    want = float64.loss(logits, tokens, LossSettings())[0]
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], torch.autograd.grad(want, logits)[0])


def test_infinite_kl_does_not_reach_the_loss_when_lambda_is_zero() -> None:
    logits, tokens = logits_and_tokens(LossSettings())
    hole = torch.zeros(N, V, dtype=torch.bool).scatter_(1, tokens.teacher_ids_NMS[:, 0, :1], True)
    hole.scatter_(1, tokens.token_ids_N[:, None], False)
    masked = logits.detach().masked_fill(hole, -torch.inf).requires_grad_()
    loss, stats = smopd_loss(masked, tokens, LossSettings(opd_coef=0.0))
    assert stats.kl_loss.item() == math.inf
    assert bool(loss.isfinite()) and bool(torch.autograd.grad(loss, masked)[0].isfinite().all())


def test_upstream_gradient_scales_and_the_graph_may_be_kept() -> None:
    logits, tokens = logits_and_tokens(LossSettings())
    loss, _ = smopd_loss(logits, tokens)
    one = torch.autograd.grad(loss, logits, retain_graph=True)[0]
    half = torch.autograd.grad(0.5 * loss, logits, retain_graph=True)[0]
    assert torch.equal(half, 0.5 * one)
    loss.backward(retain_graph=True)
    loss.backward()
    assert torch.equal(logits.grad, 2 * one)
