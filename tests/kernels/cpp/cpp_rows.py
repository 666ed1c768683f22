"""Inputs and error bounds for the tests of the C++ row kernels; their truth is in tests/kernels/float64.py.

The bounds are the project's: a term within 2e-5, an entry of the gradient within one ulp (four of float32)
and 2^-20 of the magnitudes that cancel in it.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from bench.harness.accuracy import LOGP, gradient_bound
from smopd.kernels.reference import topk as reference
from smopd.kernels.types import (
    Candidates,
    LossSettings,
    LossTokens,
    SparseTarget,
    TokenTerms,
    loss_target,
)
from tests.kernels import float64

TERM_TOLERANCE = LOGP
MOST_KNOWN = 5000  # ids that a random teacher ranks
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TERMS = tuple(field.name for field in fields(TokenTerms))


def need_extension() -> None:
    """Skips the importing module where smopd._C is not built."""
    if importlib.util.find_spec("smopd._C") is None:
        pytest.skip("smopd._C is not built", allow_module_level=True)
    importlib.import_module("smopd._C")


def random_logits(
    n_rows: int, n_vocab: int, dtype: torch.dtype, seed: int = 0, spread: float = 3.0
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (spread * torch.randn(n_rows, n_vocab, generator=generator)).to(dtype)


def random_teachers(
    n_rows: int, n_vocab: int, n_support: int, n_teachers: int = 2, seed: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """ids (N, M, S), logps, log_alpha (M,); about half of the ids are shared, the last slots may be empty.

    Of a large vocabulary every so many ids, up to the last one.
    """
    generator = torch.Generator().manual_seed(seed)
    n_known = min(n_vocab, MOST_KNOWN)
    common_NV = torch.randn(n_rows, 1, n_known, generator=generator)
    own_NMV = torch.randn(n_rows, n_teachers, n_known, generator=generator)
    logps_NMS, ids_NMS = (2.0 * common_NV + own_NMV).log_softmax(-1).topk(n_support, dim=-1)
    ids_NMS = n_vocab - 1 - (n_known - 1 - ids_NMS) * (n_vocab // n_known)
    log_alpha_M = torch.rand(n_teachers, generator=generator).log_softmax(-1)
    if n_support > 3:
        logps_NMS[::2, 0, -1] = -torch.inf
        ids_NMS[::2, 0, -1] = -(10**6)
    return ids_NMS, logps_NMS, log_alpha_M


def target_of(
    kind: str, n_rows: int, n_vocab: int, n_support: int, merge: bool, n_teachers: int = 2
) -> SparseTarget | Candidates | None:
    """kind: "none", "given" or "teachers". A pooled given target has repeats."""
    if kind == "none":
        return None
    teachers = random_teachers(n_rows, n_vocab, n_support, n_teachers)
    if kind == "teachers":
        return Candidates(*teachers, n_support, merge)
    mixture = reference.teacher_mixture(*teachers, n_support, merge=merge)
    return SparseTarget(mixture.ids_NS, mixture.logps_NS)


def random_tokens(
    logits_NV: Tensor, target: SparseTarget | Candidates | None, *, policy: bool = True, seed: int = 2
) -> LossTokens:
    """Weights of both kinds, some 0; policy: old log-probabilities near and far, and a reverse term."""
    n_rows, n_vocab = logits_NV.shape
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(n_rows, generator=generator)

    token_ids_N = torch.randint(n_vocab, (n_rows,), generator=generator)
    given = {}
    if isinstance(target, SparseTarget):
        given = {"target_ids_NS": target.ids_NS, "target_logps_NS": target.logps_NS}
        token_ids_N[::3] = target.ids_NS[::3, 0]
    elif target is not None:
        given = {
            "teacher_ids_NMS": target.ids_NMS,
            "teacher_logps_NMS": target.logps_NMS,
            "log_alpha": target.log_alpha,
        }
        token_ids_N[::3] = target.ids_NMS[::3, 0, 0]
    pieces = zip(logits_NV.split(64), token_ids_N.split(64), strict=True)
    logp_N = torch.cat([x.float().log_softmax(-1).gather(-1, ids[:, None])[:, 0] for x, ids in pieces])
    far_N = torch.where(torch.arange(n_rows) % 5 == 4, 30.0, 0.4)
    weights = [(torch.rand(n_rows, generator=generator) + 0.1) for _ in range(4)]
    for place, weight_N in enumerate(weights):
        weight_N[place + 1 :: 7] = 0.0
        weight_N[6::11] = 0.0  # a token that counts nowhere
    return LossTokens(
        token_ids_N=token_ids_N,
        adv_N=normal(),
        pg_weight_N=weights[0],
        old_logp_N=logp_N + far_N * normal() if policy else None,
        kl_weight_N=weights[1],
        ent_weight_N=weights[2],
        reverse_adv_N=normal() if policy else None,
        reverse_weight_N=weights[3] if policy else None,
        **given,
    )


def assert_terms(got: TokenTerms, true: TokenTerms) -> None:
    assert torch.equal(got.clipped_N, true.clipped_N)
    for name in TERMS:
        value_N, true_N = getattr(got, name), getattr(true, name)
        assert value_N.dtype == (torch.int8 if name == "clipped_N" else torch.float32), name
        # A surrogate of e^20 is as exact as its own size allows.
        torch.testing.assert_close(
            value_N.double(), true_N.double(), rtol=2e-6, atol=TERM_TOLERANCE, equal_nan=True, msg=name
        )


def assert_gradient(grad_NV: Tensor, true_NV: Tensor, magnitude_NV: Tensor) -> None:
    """magnitude_NV: what cancels in each entry."""
    assert torch.equal(grad_NV.isnan(), true_NV.isnan())
    bound_NV = gradient_bound(true_NV, grad_NV.dtype, magnitude_NV)
    excess_NV = (grad_NV.double() - true_NV).abs().nan_to_num(0.0) - bound_NV.nan_to_num(0.0)
    assert float(excess_NV.max()) <= 0.0, f"off by up to {float(excess_NV.max())} beyond the bound"


def magnitude(
    logits_NV: Tensor,
    token_ids_N: Tensor,
    target: SparseTarget | Candidates | None,
    *,
    tail: bool,
    temperatures: tuple[float, float],
    coef_N: Tensor,
    pull_N: Tensor,
) -> Tensor:
    """coef (p + p' + p' / p_r + sum q_v) + pull [v = y]: pull is the token's own coefficient."""
    wide_NV = logits_NV.double()
    size_NV = (wide_NV / temperatures[0]).softmax(-1)
    if target is not None:
        ready = reference.target_of(target, torch.float64, tail=tail)
        kl_p_NV = (wide_NV / temperatures[1]).softmax(-1)
        size_NV += kl_p_NV
        if tail:  # the tail's share, the softmax off the support
            held_NS = torch.where(ready.live_N[:, None], -torch.inf, wide_NV.gather(-1, ready.ids_NS))
            off_NV = wide_NV.scatter(-1, ready.ids_NS, held_NS) / temperatures[1]
            size_NV += off_NV.softmax(-1).nan_to_num(0.0)
        size_NV = size_NV.scatter_add(-1, ready.ids_NS, ready.q_NS)
    size_NV = coef_N[:, None] * size_NV
    return size_NV.scatter_add(-1, token_ids_N[:, None].long(), pull_N[:, None])


def loss_magnitude(logits_NV: Tensor, tokens: LossTokens, settings: LossSettings) -> Tensor:
    """What cancels in each entry of the loss's gradient."""
    wide = float64.in_float64(tokens)
    zero_N = torch.zeros(logits_NV.shape[0], dtype=torch.float64)
    ratio_N = zero_N.exp()
    if wide.old_logp_N is not None:
        counted = replace(tokens, pg_weight_N=torch.ones_like(tokens.adv_N))
        terms, _ = float64.true_loss(logits_NV, counted, settings)
        ratio_N = (terms.logp_N - wide.old_logp_N).clamp(-20, 20).exp()
    pull_N = wide.pg_weight_N * wide.adv_N.abs() * ratio_N
    reverse_weight_N = wide.kl_weight_N if wide.reverse_weight_N is None else wide.reverse_weight_N
    if wide.reverse_adv_N is not None and reverse_weight_N is not None:
        pull_N = pull_N + settings.opd_coef * reverse_weight_N * wide.reverse_adv_N.abs() * ratio_N
    coef_N = pull_N + settings.opd_coef * (zero_N if wide.kl_weight_N is None else wide.kl_weight_N)
    if wide.ent_weight_N is not None:
        coef_N = coef_N + settings.entropy_coef * wide.ent_weight_N * 20.0  # |log p + H| of what still weighs
    return magnitude(
        logits_NV,
        tokens.token_ids_N,
        loss_target(tokens, settings),
        tail=settings.tail,
        temperatures=(settings.temperature, settings.kl_temperature),
        coef_N=coef_N / min(settings.temperature, settings.kl_temperature),
        pull_N=pull_N / settings.temperature,
    )
