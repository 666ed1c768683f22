"""smopd_loss: loss, every statistic and the gradient against dense float64, masks and hostile logits."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch

from smopd.kernels.reference import rows as reference_rows
from smopd.ops import (
    CLIP_DUAL,
    CLIP_HIGH,
    CLIP_LOG_RATIO,
    CLIP_LOW,
    CLIP_REVERSE_HIGH,
    CLIP_REVERSE_LOW,
    LossSettings,
    LossStats,
    LossTokens,
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


def test_a_row_does_not_depend_on_the_others_nor_on_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SETTINGS["entropy-tail"]
    logits, tokens = logits_and_tokens(settings)
    loss, stats = smopd_loss(logits, tokens, settings)
    grad = torch.autograd.grad(loss, logits)[0]
    monkeypatch.setattr(reference_rows, "ROW_CHUNK_BYTES_CPU", 5 * V * 8)
    cut_loss, cut_stats = smopd_loss(logits, tokens, settings)
    assert torch.equal(loss, cut_loss) and torch.equal(grad, torch.autograd.grad(cut_loss, logits)[0])
    assert torch.equal(stats.kl_N, cut_stats.kl_N) and torch.equal(stats.entropy_N, cut_stats.entropy_N)


def test_a_row_of_log_alpha_per_token_is_cut_with_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, tokens = logits_and_tokens(LossSettings())
    per_token = torch.rand(N, 2, dtype=torch.float64).log()
    tokens = replace(tokens, log_alpha=per_token)
    whole = smopd_loss(logits, tokens)[0]
    torch.testing.assert_close(whole, float64.loss(logits, tokens, LossSettings())[0])
    monkeypatch.setattr(reference_rows, "ROW_CHUNK_BYTES_CPU", 5 * V * 8)
    assert torch.equal(whole, smopd_loss(logits, tokens)[0])


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
def test_low_precision(dtype: torch.dtype) -> None:
    settings = LossSettings(entropy_coef=0.01, temperature=0.7)
    torch.manual_seed(4)
    logits = (3 * torch.randn(N, V)).to(dtype).requires_grad_()
    tokens = float64.random_tokens(N, V, logits, 0.7, 4, **teachers())
    loss, _ = smopd_loss(logits, tokens, settings)
    exact = logits.detach().double().requires_grad_()
    want, _ = float64.loss(exact, tokens, settings)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(want.item(), rel=2e-5, abs=2e-5)
    got = torch.autograd.grad(loss, logits)[0]
    assert got.dtype == dtype
    want_grad = torch.autograd.grad(want, exact)[0]
    bound = torch.finfo(dtype).eps * want_grad.abs() + 2.0**-20 * 16 + torch.finfo(dtype).smallest_normal
    assert bool(((got.double() - want_grad).abs() <= bound).all())


def policy_only(adv: float, log_ratio: float, settings: LossSettings, reverse_adv: float | None = None):
    logits = torch.randn(1, 5, dtype=torch.float64, requires_grad=True)
    logp = (logits.detach() / settings.temperature).log_softmax(-1)[:, 2]
    one = torch.ones(1, dtype=torch.float64)
    tokens = LossTokens(
        token_ids_N=torch.tensor([2]),
        adv_N=adv * one,
        pg_weight_N=one,
        old_logp_N=logp - log_ratio,
        reverse_adv_N=None if reverse_adv is None else reverse_adv * one,
        reverse_weight_N=None if reverse_adv is None else one,
    )
    loss, stats = smopd_loss(logits, tokens, settings)
    grad = torch.autograd.grad(loss, logits)[0]
    return loss.item(), int(stats.clipped_N), float(grad.abs().max())


@pytest.mark.parametrize(
    ("adv", "ratio", "dual", "value", "bits", "flat"),
    [
        (2.0, 1.0, None, -2.0, 0, False),
        (2.0, 1.5, None, -2.4, CLIP_HIGH, True),
        (2.0, 0.5, None, -1.0, 0, False),
        (-2.0, 0.5, None, 1.6, CLIP_LOW, True),
        (-2.0, 1.5, None, 3.0, 0, False),
        (-2.0, 9.0, 3.0, 6.0, CLIP_DUAL, True),
        (-2.0, 9.0, None, 18.0, 0, False),
        (2.0, 9.0, 3.0, -2.4, CLIP_HIGH, True),
        (-2.0, math.exp(30.0), None, 2.0 * math.exp(20.0), CLIP_LOG_RATIO, True),
        (2.0, math.exp(-30.0), None, -2.0 * math.exp(-20.0), CLIP_LOG_RATIO, True),
        (0.0, 9.0, 3.0, 0.0, 0, True),
    ],
)
def test_each_case_of_the_clip(adv, ratio, dual, value, bits, flat) -> None:
    got, got_bits, slope = policy_only(adv, math.log(ratio), LossSettings(dual_clip=dual))
    assert got == pytest.approx(value, rel=1e-9, abs=1e-12)
    assert got_bits == bits
    assert (slope == 0.0) == flat


@pytest.mark.parametrize(
    ("surrogate", "adv", "ratio", "value", "bits", "flat"),
    [
        ("paper", 2.0, 1.0, -2.0, 0, False),
        ("paper", 2.0, 0.5, -1.6, CLIP_REVERSE_LOW, True),
        ("paper", -2.0, 1.5, 2.4, CLIP_REVERSE_HIGH, True),
        ("paper", 2.0, 1.5, -2.4, CLIP_REVERSE_HIGH, True),
        ("ppo", 2.0, 0.5, -1.0, 0, False),
        ("ppo", -2.0, 1.5, 3.0, 0, False),
        ("ppo", 2.0, 1.5, -2.4, CLIP_REVERSE_HIGH, True),
        ("ppo", -2.0, 0.5, 1.6, CLIP_REVERSE_LOW, True),
    ],
)
def test_each_case_of_the_reverse_term(surrogate, adv, ratio, value, bits, flat) -> None:
    settings = LossSettings(reverse_kl_surrogate=surrogate)
    got, got_bits, slope = policy_only(0.0, math.log(ratio), settings, reverse_adv=adv)
    assert got == pytest.approx(value, rel=1e-9)
    assert got_bits == bits
    assert (slope == 0.0) == flat


def test_without_old_log_probabilities_the_ratio_is_one_and_has_a_gradient() -> None:
    logits, tokens = logits_and_tokens(LossSettings(), old_logp_N=None)
    loss, stats = smopd_loss(logits, tokens)
    torch.testing.assert_close(stats.pg_loss, -(tokens.pg_weight_N * tokens.adv_N).sum())
    want = float64.loss(logits, tokens, LossSettings())[0]
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], torch.autograd.grad(want, logits)[0])


def test_no_tokens() -> None:
    logits, tokens = logits_and_tokens(LossSettings())
    empty = logits[:0]
    loss, stats = smopd_loss(empty, tokens.rows(0, 0))
    assert loss.item() == 0.0 and stats.logp_N.shape == (0,) and stats.clipped_N.dtype == torch.int8
    loss.backward()
    assert torch.equal(logits.grad, torch.zeros_like(logits))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["defaults", "entropy", "two-temperatures"])
def test_masked_tokens_add_exactly_nothing_whatever_their_logits(name: str, bad: float) -> None:
    settings = SETTINGS[name]
    logits, tokens = logits_and_tokens(settings)
    keep = torch.arange(N) % 3 != 0
    columns = ("pg_weight_N", "kl_weight_N", "ent_weight_N")
    tokens = replace(tokens, **{name: torch.where(keep, getattr(tokens, name), 0.0) for name in columns})
    want = smopd_loss(logits, tokens, settings)[0]
    want_grad = torch.autograd.grad(want, logits)[0]
    broken = torch.where(keep[:, None], logits.detach(), bad).requires_grad_()
    loss, _ = smopd_loss(broken, tokens, settings)
    assert torch.equal(loss, want)
    grad = torch.autograd.grad(loss, broken)[0]
    assert torch.equal(grad, want_grad) and not bool(grad[~keep].any())


def test_all_masked_gives_zeros() -> None:
    zeros = torch.zeros(N, dtype=torch.float64)
    logits, tokens = logits_and_tokens(
        LossSettings(), pg_weight_N=zeros, kl_weight_N=zeros, ent_weight_N=zeros, reverse_adv_N=None
    )
    loss, _ = smopd_loss(logits, tokens)
    assert loss.item() == 0.0 and not bool(torch.autograd.grad(loss, logits)[0].any())


def test_minus_inf_logits_outside_target_and_token() -> None:
    settings = LossSettings(entropy_coef=0.1)
    logits, tokens = logits_and_tokens(settings)
    used = torch.zeros(N, V, dtype=torch.bool).scatter_(1, tokens.teacher_ids_NMS.flatten(1), True)
    used.scatter_(1, tokens.token_ids_N[:, None], True)
    hole = ~used & (torch.arange(V) % 2 == 0)
    masked = logits.detach().masked_fill(hole, -torch.inf).requires_grad_()
    low = logits.detach().masked_fill(hole, -800.0).requires_grad_()
    loss, stats = smopd_loss(masked, tokens, settings)
    want = float64.loss(low, tokens, settings)[0]
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(torch.autograd.grad(loss, masked)[0], torch.autograd.grad(want, low)[0])
    assert bool(stats.entropy_N.isfinite().all())


def test_huge_logits_stay_finite() -> None:
    logits, tokens = logits_and_tokens(LossSettings(entropy_coef=0.1), old_logp_N=None)
    huge = (1e4 * logits.detach()).float().requires_grad_()
    loss, stats = smopd_loss(huge, tokens, LossSettings(entropy_coef=0.1))
    assert bool(loss.isfinite()) and bool(torch.autograd.grad(loss, huge)[0].isfinite().all())
    want, want_stats = float64.loss(huge.detach().double(), tokens, LossSettings(entropy_coef=0.1))
    assert loss.item() == pytest.approx(want.item(), rel=2e-5)
    torch.testing.assert_close(stats.kl_N.double(), want_stats["kl_N"], rtol=2e-5, atol=2e-5)


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


def test_repeated_runs_are_bitwise_equal() -> None:
    logits, tokens = logits_and_tokens(LossSettings())
    grads = [torch.autograd.grad(smopd_loss(logits, tokens)[0], logits)[0] for _ in range(3)]
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])
