"""Cases of the Triton row kernel, their truth in float64, and how far from it a result may be.

A test module that imports this is skipped where triton/device.py finds nothing to run on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.triton import device

# isort: split
from bench.harness.accuracy import CANCELLATION, LOGP, ulp
from smopd.kernels.reference import topk as reference
from smopd.kernels.triton import loss as triton_loss
from smopd.kernels.types import LossSettings, LossTokens, TokenTerms, loss_target
from tests.kernels import cases
from tests.kernels.float64 import true_loss

DEVICE = torch.device(device.DEVICE)
DTYPES = cases.DTYPES
TERM_TOLERANCE, TERM_RELATIVE = LOGP, 2e-6
FP32_ULPS = 8


@dataclass
class Case:
    """Arguments of loss_rows, columns in fp32 on the device."""

    logits: Tensor
    tokens: LossTokens
    settings: LossSettings


def strided(rows: Tensor, kind: str) -> Tensor:
    """The same rows, with a gap behind each: of 16 bytes' multiples, or not."""
    n_rows, n_vocab = rows.shape
    gap = {"dense": 0, "aligned": -n_vocab % 16 + 16, "odd": (n_vocab + 1) % 2 + 2}[kind]
    buffer = rows.new_full((n_rows, n_vocab + gap), math.nan)
    buffer[:, :n_vocab] = rows
    return buffer[:, :n_vocab]


def teachers(
    n_rows: int, n_vocab: int, n_teachers: int, n_support: int, ids: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(N, M, S) ids and log-probabilities; some slots are empty and hold an id out of range."""
    logits = 2 * torch.randn(n_rows, n_teachers, min(n_vocab, 3000))
    if n_teachers > 1:
        logits[:, 1] = 0.7 * logits[:, 0] + 0.7 * logits[:, 1]  # so that ids come twice
    logps, at = logits.log_softmax(-1).topk(n_support, dim=-1)
    spread = max(1, n_vocab // logits.shape[-1])
    at = at * spread + n_vocab - 1 - (logits.shape[-1] - 1) * spread  # up to the row's last element
    empty = torch.rand(logps.shape) < 0.1
    return at.masked_fill(empty, 2**31 - 1).to(ids), logps.masked_fill(empty, -math.inf)


def make(
    shape: str = "5x1271",
    dtype: str = "bf16",
    target: str = "pooled",
    tail: bool = False,
    entropy: bool = False,
    temperatures: tuple[float, float] = (1.0, 1.0),
    dual: bool = False,
    reverse: str | None = None,
    old: bool = True,
    rows: str = "dense",
    ids: torch.dtype = torch.int32,
    kappa: int = 16,
    n_teachers: int = 2,
    seed: int = 0,
    **_: Any,
) -> Case:
    torch.manual_seed(seed)
    n_rows, n_vocab = map(int, shape.split("x"))
    temperature, kl_temperature = temperatures
    logits = (3 * torch.randn(n_rows, n_vocab)).to(DTYPES[dtype])
    n_support = min(kappa, n_vocab)
    if target == "mixture first":
        n_teachers, n_support = 9, min(n_vocab, 17)
    token_ids = torch.randint(0, n_vocab, (n_rows,))
    columns: dict[str, Any] = {
        "adv_N": torch.randn(n_rows),
        "pg_weight_N": torch.rand(n_rows),
        "kl_weight_N": torch.rand(n_rows),
        "ent_weight_N": torch.rand(n_rows),
    }
    if n_rows > 3:
        for name in ("pg_weight_N", "kl_weight_N", "ent_weight_N"):
            columns[name][3] = 0.0
        columns["kl_weight_N"][1] = 0.0
    if target in ("pooled", "merged", "mixture first"):
        at, logps = teachers(n_rows, n_vocab, n_teachers, n_support, ids)
        columns |= {"teacher_ids_NMS": at, "teacher_logps_NMS": logps}
        columns["log_alpha"] = torch.rand(n_rows, n_teachers).add(0.1).log().log_softmax(-1)
    elif target != "none":
        at, logps = teachers(n_rows, n_vocab, 2 if target == "repeats" else 1, n_support, ids)
        at, logps = at.flatten(1), (logps - math.log(at.shape[1])).flatten(1)
        columns |= {"target_ids_NS": at, "target_logps_NS": logps}
    if target != "none" and kappa > 0 and logps.flatten()[0] > -math.inf:
        token_ids[0] = at.flatten()[0]
    if old:
        logq = (logits.to(DEVICE).double() / temperature).log_softmax(-1).cpu()
        logp = logq.gather(-1, token_ids[:, None])[:, 0]
        columns["old_logp_N"] = (logp + 0.4 * torch.randn(n_rows)).float()
    if reverse is not None:
        columns["reverse_adv_N"] = torch.randn(n_rows)
    settings = LossSettings(
        merge=target != "pooled",
        tail=tail,
        kappa=kappa,
        entropy_coef=0.1 if entropy else 0.0,
        temperature=temperature,
        kl_temperature=kl_temperature,
        opd_coef=0.7,
        dual_clip=1.5 if dual else None,
        reverse_kl_surrogate=reverse or "paper",
    )
    tokens = LossTokens(token_ids_N=token_ids.to(ids), **columns)
    return Case(
        strided(logits, rows).to(DEVICE) if rows == "dense" else strided(logits.to(DEVICE), rows),
        cast(tokens, device=DEVICE),
        settings,
    )


def cast(tokens: LossTokens, **to: Any) -> LossTokens:
    columns = {field.name: getattr(tokens, field.name) for field in fields(tokens)}
    floating = {key: value for key, value in to.items() if key != "device"}

    def moved(value: Tensor | None) -> Tensor | None:
        if value is None:
            return None
        return value.to(device=to.get("device"), **(floating if value.is_floating_point() else {}))

    return LossTokens(**{name: moved(value) for name, value in columns.items()})


def truth(case: Case) -> tuple[TokenTerms, Tensor, Tensor]:
    """Terms, gradient, and the size of what cancels in the gradient, all in float64."""
    terms, grad = true_loss(case.logits, case.tokens, case.settings)
    return terms, grad, cancelling(case)


def kl_size(case_logits: Tensor, target: Any, weight_N: Tensor, tail: bool, temperature: float) -> Tensor:
    """w (p_v + q_v) of the rule; off the support q_v is the element's share of the tail's teacher mass."""
    p_NV = (case_logits.double() / temperature).softmax(-1)
    ready = reference.target_of(target, torch.float64, tail=tail)
    size_NV = p_NV.clone()
    if tail:
        off_NV = torch.where(ready.live_N[:, None], p_NV.scatter(-1, ready.ids_NS, 0.0), p_NV)
        rest_N = (1.0 - ready.mass_N).clamp(min=0.0)
        size_NV += (rest_N / off_NV.sum(-1))[:, None].nan_to_num(0.0, posinf=0.0) * off_NV
    size_NV.scatter_add_(-1, ready.ids_NS, ready.q_NS)
    return weight_N.double().abs()[:, None] / temperature * size_NV


def cancelling(case: Case) -> Tensor:
    """w (p_v + sum q_v + |c_pg|) of the rule, and the like for the entropy."""
    tokens, settings = case.tokens, case.settings
    wide = case.logits.double()
    size = torch.zeros_like(wide)
    target = loss_target(tokens, settings)
    if target is not None and tokens.kl_weight_N is not None:
        weight = settings.opd_coef * tokens.kl_weight_N
        size += kl_size(wide, target, weight, settings.tail, settings.kl_temperature)
    logq = (wide / settings.temperature).log_softmax(-1)
    ratio = torch.ones_like(logq[:, 0])
    if tokens.old_logp_N is not None:
        logp = logq.gather(-1, tokens.token_ids_N.long()[:, None])[:, 0]
        ratio = (logp - tokens.old_logp_N.double()).clamp(-20, 20).exp()
    slope = (tokens.pg_weight_N * tokens.adv_N).double().abs()
    if tokens.reverse_adv_N is not None:
        slope = slope + (settings.opd_coef * tokens.kl_weight_N * tokens.reverse_adv_N).double().abs()
    size += (slope * ratio)[:, None] / settings.temperature
    if tokens.ent_weight_N is not None:
        weight = settings.entropy_coef * tokens.ent_weight_N.double()[:, None] / settings.temperature
        size += weight * logq.exp() * (1 + logq.clamp(min=-1e4).abs())
    return size


def check_gradient(got: Tensor, want: Tensor, size: Tensor) -> None:
    ulps = FP32_ULPS if got.dtype == torch.float32 else 1
    allowed = ulps * ulp(want, got.dtype) + CANCELLATION * size
    worst = ((got.double() - want).abs() / allowed).max().item()
    assert worst <= 1.0, f"a gradient is {worst:.2f} times as far off as allowed"


def check_terms(got: TokenTerms, want: TokenTerms) -> None:
    for field in fields(TokenTerms):
        mine, exact = getattr(got, field.name), getattr(want, field.name)
        torch.testing.assert_close(
            mine.double(),
            exact.double(),
            rtol=TERM_RELATIVE,
            atol=TERM_TOLERANCE,
            equal_nan=True,
            msg=lambda message, name=field.name: f"{name}: {message}",
        )


def poisoned(logits: Tensor) -> Tensor:
    return torch.empty_strided(logits.shape, logits.stride(), dtype=logits.dtype, device=logits.device).fill_(
        math.nan
    )


def stream(monkeypatch: pytest.MonkeyPatch, held: int = 2) -> None:
    """Blocks so small that a short row streams, and is partly held."""
    small = triton_loss._Configuration(1, 8, held)
    monkeypatch.setattr(triton_loss, "_configuration", lambda *_, **__: small)


def run(case: Case, gradient: str = "own") -> tuple[TokenTerms, Tensor | None]:
    if gradient == "none":
        return triton_loss.loss_rows(case.logits, case.tokens, case.settings, None), None
    logits = case.logits
    if gradient == "in place":
        logits = torch.empty_strided(logits.shape, logits.stride(), dtype=logits.dtype, device=logits.device)
        logits.copy_(case.logits)
    grad = logits if gradient == "in place" else poisoned(logits)
    before = logits.clone()
    terms = triton_loss.loss_rows(logits, case.tokens, case.settings, grad)
    if gradient == "own":
        torch.testing.assert_close(logits, before, rtol=0.0, atol=0.0, equal_nan=True)
    return terms, grad


def compare_anything(case: Case) -> None:
    """Terms and gradient as the reference has them, infinities and NaN at the same places."""
    want, want_grad, size = truth(case)
    terms, grad = run(case)
    check_terms(terms, want)
    assert torch.equal(grad.isnan(), want_grad.isnan())
    fine = want_grad.isfinite()
    check_gradient(grad[fine], want_grad[fine], size[fine].nan_to_num(0.0, posinf=0.0))
