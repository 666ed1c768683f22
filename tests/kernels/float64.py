"""Truth in float64 for the kernels' tests, and the bounds of results.

For finite numbers the truth is bench/harness/objective.py with autograd, which shares no code with
smopd.kernels. For infinities and NaN it is the reference in float64 (`defined_loss`).

Bounds: 2e-5 for a term; for an entry of the gradient four ulps of float32 or one of a half type, plus 2^-20
of the magnitudes that cancel in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from bench.harness import objective
from bench.harness.accuracy import CANCELLATION, LOGP, ULPS, ulp
from smopd import ops
from smopd.kernels.reference import loss as reference_loss
from smopd.kernels.reference.loss import prepare_target
from smopd.kernels.types import LossSettings, LossTokens, SparseTarget, TokenTerms, loss_target

TERMS = tuple(field.name for field in fields(TokenTerms))
TERM = {"rtol": 2e-6, "atol": LOGP, "equal_nan": True}  # rtol: for surrogates of e^20
TERM_64 = {"rtol": 1e-11, "atol": 1e-12, "equal_nan": True}
GRADIENT_64 = {"rtol": 1e-9, "atol": 1e-12, "equal_nan": True}
TRITON_FP32_ULPS = 8
REFERENCE_FP32 = 8.0  # times the bound: torch's exponentials round more
MOST_LOGP = 20.0  # limit of |log p| in the size of an entropy's gradient


@dataclass(frozen=True)
class Truth:
    """True terms and gradient, and the size of the terms that cancel in each entry of the gradient.

    slope_N: size of the surrogate's slope. tail_NV: extra size for hostile rows, as if the tail held all the
    teachers' mass.
    """

    terms: TokenTerms
    grad_NV: Tensor
    size_NV: Tensor
    slope_N: Tensor
    tail_NV: Tensor | None = None

    def at(self, rows: Tensor) -> Truth:
        terms = TokenTerms(*(getattr(self.terms, name)[rows] for name in TERMS))
        tail_NV = None if self.tail_NV is None else self.tail_NV[rows]
        return Truth(terms, self.grad_NV[rows], self.size_NV[rows], self.slope_N[rows], tail_NV)


def in_float64(value):
    """Convert the floating tensors of a dataclass to float64."""
    columns = {field.name: getattr(value, field.name) for field in fields(value)}
    wide = {n: c.double() for n, c in columns.items() if isinstance(c, Tensor) and c.is_floating_point()}
    return replace(value, **wide)


def true_loss(logits_NV: Tensor, tokens: LossTokens, settings: LossSettings) -> Truth:
    """Return the truth for finite numbers by autograd; 0 for tokens without any weight."""
    wide = in_float64(tokens)
    leaf_NV = logits_NV.detach().double().requires_grad_()
    part = objective.terms(leaf_NV, wide, settings)
    (grad_NV,) = torch.autograd.grad(part.weighted.sum(), leaf_NV)
    weights = (wide.pg_weight_N, wide.kl_weight_N, wide.ent_weight_N, wide.reverse_weight_N)
    counted_N = torch.stack([weight_N != 0 for weight_N in weights if weight_N is not None]).any(0)
    masses = (part.teacher_mass, part.student_mass)
    values = (part.logp, part.entropy, part.kl, *masses, part.surrogate, part.reverse)
    columns = [torch.where(counted_N, value.detach(), 0.0) for value in values]
    bits_N = clip_bits(part.logp.detach(), wide, settings) * counted_N
    terms = TokenTerms(*columns[:5], bits_N.to(torch.int8), *columns[5:])
    return Truth(terms, grad_NV, *magnitude(logits_NV, tokens, settings, part.logp.detach()))


def clip_bits(logp_N: Tensor, tokens: LossTokens, settings: LossSettings) -> Tensor:
    log_ratio_N = torch.zeros_like(logp_N) if tokens.old_logp_N is None else logp_N - tokens.old_logp_N
    ratio_N = log_ratio_N.clamp(-20, 20).exp()
    low_N, high_N = ratio_N < 1 - settings.clip_low, ratio_N > 1 + settings.clip_high
    adv_N = tokens.adv_N
    bits_N = ops.CLIP_LOW * (low_N & (adv_N < 0)) + ops.CLIP_HIGH * (high_N & (adv_N > 0))
    bits_N = bits_N + ops.CLIP_LOG_RATIO * (log_ratio_N.abs() > 20)
    if settings.dual_clip is not None:
        dual_N = (adv_N < 0) & (ratio_N.clamp(min=1 - settings.clip_low) > settings.dual_clip)
        bits_N = bits_N + ops.CLIP_DUAL * dual_N
    if tokens.reverse_adv_N is not None:
        if settings.reverse_kl_surrogate == "ppo":
            low_N, high_N = low_N & (tokens.reverse_adv_N < 0), high_N & (tokens.reverse_adv_N > 0)
        bits_N = bits_N + ops.CLIP_REVERSE_LOW * low_N + ops.CLIP_REVERSE_HIGH * high_N
    return bits_N


def defined_loss(logits_NV: Tensor, tokens: LossTokens, settings: LossSettings) -> Truth:
    """Return the truth for any numbers by the reference in float64."""
    grad_NV = torch.empty_like(logits_NV, dtype=torch.float64)
    terms = reference_loss.loss_rows(logits_NV.double(), in_float64(tokens), settings, grad_NV)
    size = magnitude(logits_NV, tokens, settings, terms.logp_N)
    target, tail_NV = loss_target(tokens, settings), None
    if target is not None and tokens.kl_weight_N is not None and settings.tail:
        weight_N = settings.opd_coef * tokens.kl_weight_N.double()
        tail_NV = tail_size(logits_NV, target, weight_N, settings.kl_temperature)
    return Truth(terms, grad_NV, *size, tail_NV)


def magnitude(
    logits_NV: Tensor, tokens: LossTokens, settings: LossSettings, logp_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the size of the terms of each entry of the gradient, and of the surrogate's slope."""
    wide = in_float64(tokens)
    zero_N = logits_NV.new_zeros(logits_NV.shape[0], dtype=torch.float64)
    ratio_N = zero_N.exp()
    if wide.old_logp_N is not None:
        ratio_N = (logp_N - wide.old_logp_N).clamp(-20, 20).exp()
    slope_N = (wide.pg_weight_N * wide.adv_N).abs() * ratio_N
    reverse_weight_N = wide.kl_weight_N if wide.reverse_weight_N is None else wide.reverse_weight_N
    if wide.reverse_adv_N is not None and reverse_weight_N is not None:
        slope_N = slope_N + settings.opd_coef * (reverse_weight_N * wide.reverse_adv_N).abs() * ratio_N
    size_NV = policy_size(logits_NV, tokens.token_ids_N, slope_N, settings.temperature)
    if wide.ent_weight_N is not None and settings.entropy_coef != 0.0:
        logq_NV = (logits_NV.double() / settings.temperature).log_softmax(-1)
        weight_N = settings.entropy_coef * wide.ent_weight_N.abs() / settings.temperature
        size_NV += weight_N[:, None] * logq_NV.exp() * (1 + logq_NV.abs()).clamp(max=MOST_LOGP)
    target = loss_target(tokens, settings)
    if target is not None and wide.kl_weight_N is not None:
        weight_N = settings.opd_coef * wide.kl_weight_N
        size_NV += kl_size(logits_NV, target, weight_N, settings.tail, settings.kl_temperature)
    return size_NV, slope_N / settings.temperature


def policy_size(logits_NV: Tensor, token_ids_N: Tensor, slope_N: Tensor, temperature: float) -> Tensor:
    """Return slope (p_v + [v = y])."""
    p_NV = (logits_NV.double() / temperature).softmax(-1)
    own_N1 = torch.ones_like(p_NV[:, :1])
    size_NV = p_NV.scatter_add(-1, token_ids_N[:, None].long().clamp(min=0), own_N1).clamp(max=1.0)
    return slope_N.double()[:, None] / temperature * size_NV


def kl_size(
    logits_NV: Tensor, target: SparseTarget, weight_N: Tensor, tail: bool, temperature: float
) -> Tensor:
    """Return w (p_v + q_v); off the support q_v is a share of the tail's teacher mass."""
    p_NV = (logits_NV.double() / temperature).softmax(-1)
    ready = prepare_target(target, torch.float64, tail=tail)
    size_NV = p_NV.clone()
    if tail:
        off_NV = torch.where(ready.live_N[:, None], p_NV.scatter(-1, ready.ids_NS, 0.0), p_NV)
        rest_N = (1.0 - ready.mass_N).clamp(min=0.0)
        size_NV += (rest_N / off_NV.sum(-1))[:, None].nan_to_num(0.0, posinf=0.0) * off_NV
    size_NV.scatter_add_(-1, ready.ids_NS, ready.q_NS)
    return weight_N.double().abs()[:, None] / temperature * size_NV


def tail_size(logits_NV: Tensor, target: SparseTarget, weight_N: Tensor, temperature: float) -> Tensor:
    """Return w p_v / p_r off the support."""
    ready = prepare_target(target, torch.float64, tail=True)
    wide_NV = logits_NV.double() / temperature
    held_NS = torch.where(ready.live_N[:, None], -torch.inf, wide_NV.gather(-1, ready.ids_NS))
    off_NV = wide_NV.scatter(-1, ready.ids_NS, held_NS)
    return weight_N.abs()[:, None] / temperature * off_NV.softmax(-1).nan_to_num(0.0)


def check_terms(got: TokenTerms, true: TokenTerms) -> None:
    assert torch.equal(got.clipped_N, true.clipped_N) and got.clipped_N.dtype == torch.int8
    for name in TERMS:
        if name != "clipped_N":
            check_term(getattr(got, name), getattr(true, name), name)


def check_term(got_N: Tensor, true_N: Tensor, name: str = "") -> None:
    close = TERM_64 if got_N.dtype == torch.float64 else TERM
    assert got_N.dtype in (torch.float32, torch.float64), name
    torch.testing.assert_close(
        got_N.double(), true_N.double(), **close, msg=lambda message: f"{name}: {message}"
    )


def check_gradient(got_NV: Tensor, true: Truth, backend: str = "") -> None:
    """Compare a gradient: NaN where the truth is NaN, infinite where it overflows, else within the bound."""
    true_NV, size_NV = true.grad_NV, true.size_NV
    if got_NV.dtype == torch.float64:
        torch.testing.assert_close(got_NV, true_NV, **GRADIENT_64)
        return
    assert torch.equal(got_NV.isnan(), true_NV.isnan())
    ulps, slack = ULPS[got_NV.dtype], 1.0
    if backend != "cpp":  # C++ is also exact for small probabilities
        size_NV = torch.maximum(size_NV, true.slope_N[:, None].expand_as(size_NV))
    if not backend.startswith("triton") and true.tail_NV is not None:
        size_NV = size_NV + true.tail_NV
    if got_NV.dtype == torch.float32:
        ulps = TRITON_FP32_ULPS if backend.startswith("triton") else ulps
        slack = REFERENCE_FP32 if backend == "reference" else slack
    bound_NV = ulps * ulp(true_NV, got_NV.dtype) + CANCELLATION * size_NV
    wide_NV = got_NV.double()
    off_NV = torch.where(wide_NV == true_NV, 0.0, (wide_NV - true_NV).abs())
    off_NV = torch.where(got_NV.isinf(), short_of_infinity(true_NV * wide_NV.sign(), got_NV.dtype), off_NV)
    worst_NV = off_NV.nan_to_num(0.0, posinf=math.inf) / bound_NV.nan_to_num(math.inf, posinf=math.inf)
    worst = float(worst_NV.max()) if worst_NV.numel() else 0.0
    assert worst <= slack, f"a gradient is {worst:.2f} times as far off as allowed"


def short_of_infinity(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the distance below the least number that rounds to +inf in dtype."""
    largest = value.new_tensor(torch.finfo(dtype).max)
    return (largest + ulp(largest, dtype) / 2 - value).clamp(min=0.0)
