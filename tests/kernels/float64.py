"""The truth of the kernels' tests, in float64, and inputs of the public operations.

The public operations, and with them the reference, are held to bench/harness/objective.py, which shares
nothing with smopd.kernels; C++ and Triton to the reference in float64 on the same rounded inputs.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace

import torch
from torch import Tensor

from bench.harness import objective
from smopd.kernels.reference import loss as reference_loss
from smopd.kernels.types import TokenTerms
from smopd.ops import LossSettings, LossTokens

# gradcheck's options beside a comparison with the dense gradient, number by number: one random projection of
# the whole Jacobian, held ten times closer, instead of two calls for each number.
ALL_AT_ONCE = {"fast_mode": True, "atol": 1e-8, "rtol": 1e-4}


def random_topk(
    n_rows: int, n_vocab: int, n_support: int, seed: int, dtype=torch.float64
) -> tuple[Tensor, Tensor]:
    """Distinct ids (N, S) and the log-probabilities of a random softmax."""
    logits = 2.0 * torch.randn(n_rows, n_vocab, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    logps, ids = logits.log_softmax(-1).topk(n_support, dim=-1)
    return ids, logps


def random_teachers(
    n_rows: int, n_teachers: int, n_vocab: int, n_support: int, seed: int, dtype=torch.float64
):
    parts = [random_topk(n_rows, n_vocab, n_support, seed + 100 * m, dtype) for m in range(n_teachers)]
    return torch.stack([ids for ids, _ in parts], 1), torch.stack([logps for _, logps in parts], 1)


def as_rows(ids: Tensor, logps: Tensor) -> list[list[tuple[int, float]]]:
    """Each row's live (id, log-probability) pairs."""
    return [
        [(int(token), float(logp)) for token, logp in zip(i, p, strict=True) if logp > -math.inf]
        for i, p in zip(ids, logps, strict=True)
    ]


def loss(logits: Tensor, tokens: LossTokens, settings: LossSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """The objective of smopd_loss and its statistics, in the logits' dtype, by autograd."""
    terms = objective.terms(logits, tokens, settings)

    def total(weight_N: Tensor | None, value_N: Tensor) -> Tensor:
        return value_N.new_zeros(()) if weight_N is None else (weight_N.to(value_N.dtype) * value_N).sum()

    reverse_weight_N = tokens.kl_weight_N if tokens.reverse_weight_N is None else tokens.reverse_weight_N
    stats = {
        "logp_N": terms.logp,
        "entropy_N": terms.entropy,
        "kl_N": terms.kl,
        "teacher_mass_N": terms.teacher_mass,
        "student_mass_N": terms.student_mass,
        "pg_loss": total(tokens.pg_weight_N, terms.surrogate),
        "kl_loss": total(tokens.kl_weight_N, terms.kl),
        "entropy": total(tokens.ent_weight_N, terms.entropy),
        "reverse_loss": total(reverse_weight_N, terms.reverse),
    }
    return terms.weighted.sum(), {name: value.detach() for name, value in stats.items()}


def picked(tokens: LossTokens, rows: Tensor) -> LossTokens:
    """The tokens at these rows; log_alpha is one for all of them."""
    values = {field.name: getattr(tokens, field.name) for field in fields(tokens)}
    return LossTokens(
        **{
            name: value if value is None or name == "log_alpha" else value[rows]
            for name, value in values.items()
        }
    )


def some_rows(n_rows: int, n_some: int = 24) -> Tensor:
    """Rows from the first to the last, evenly."""
    return torch.linspace(0, n_rows - 1, min(n_some, n_rows)).long()


def in_float64(tokens: LossTokens) -> LossTokens:
    values = {field.name: getattr(tokens, field.name) for field in fields(tokens)}
    wide = {name: v.double() for name, v in values.items() if v is not None and v.is_floating_point()}
    return replace(tokens, **wide)


def true_loss(logits_NV: Tensor, tokens: LossTokens, settings: LossSettings) -> tuple[TokenTerms, Tensor]:
    """The terms and the gradient in the logits."""
    grad_NV = torch.empty_like(logits_NV, dtype=torch.float64)
    return reference_loss.loss_rows(logits_NV.double(), in_float64(tokens), settings, grad_NV), grad_NV


def random_tokens(
    n_rows: int, n_vocab: int, logits: Tensor, temperature: float, seed: int, **more
) -> LossTokens:
    """Tokens with every column, ratios on both sides of the clip, some weights 0; more replaces columns."""
    gen = torch.Generator().manual_seed(seed)

    def rand() -> Tensor:
        return torch.rand(n_rows, generator=gen, dtype=torch.float64)

    def randn() -> Tensor:
        return torch.randn(n_rows, generator=gen, dtype=torch.float64)

    token_ids = torch.randint(0, n_vocab, (n_rows,), generator=gen)
    logq = (logits.detach().double() / temperature).log_softmax(-1)
    columns = {
        "token_ids_N": token_ids,
        "adv_N": randn(),
        "pg_weight_N": rand() * (rand() > 0.2),
        "old_logp_N": logq[torch.arange(n_rows), token_ids] + 0.5 * randn(),
        "kl_weight_N": rand() * (rand() > 0.2),
        "ent_weight_N": rand(),
        "reverse_adv_N": randn(),
    }
    return LossTokens(**{**columns, **more})
