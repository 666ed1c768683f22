"""The tokens of a loss: which count and at which weights, and the sum of their terms from any backend.

Shapes: N tokens.
"""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from smopd.kernels.types import LossSettings, LossStats, LossTokens, TokenTerms, loss_target

STATS_FIELDS = tuple(field.name for field in fields(LossStats))
TERMS = tuple(field.name for field in fields(TokenTerms))
BLOCK = 1024  # so few torch adds on one thread


def counted(tokens: LossTokens) -> Tensor:
    """(N,) bool: the tokens with a weight that is not 0."""
    weights = (tokens.pg_weight_N, tokens.kl_weight_N, tokens.ent_weight_N, tokens.reverse_weight_N)
    return torch.stack([weight_N != 0 for weight_N in weights if weight_N is not None]).any(0)


def reverse_weight(tokens: LossTokens) -> Tensor | None:
    return tokens.kl_weight_N if tokens.reverse_weight_N is None else tokens.reverse_weight_N


def coefficients(tokens: LossTokens, settings: LossSettings, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
    """What multiplies surrogate, KL, reverse term and entropy in the loss; None where a term is off."""

    def scaled(weight_N: Tensor | None, coef: float, there: bool = True) -> Tensor | None:
        return None if weight_N is None or coef == 0.0 or not there else coef * weight_N.to(dtype)

    return (
        scaled(tokens.pg_weight_N, 1.0),
        scaled(tokens.kl_weight_N, settings.opd_coef, loss_target(tokens, settings) is not None),
        scaled(reverse_weight(tokens), settings.opd_coef, tokens.reverse_adv_N is not None),
        scaled(tokens.ent_weight_N, -settings.entropy_coef),
    )


def idle(coefs: tuple[Tensor | None, ...]) -> Tensor:
    """(N,) bool: the tokens whose gradient is 0 whatever their logits."""
    return torch.stack([coef_N == 0 for coef_N in coefs if coef_N is not None]).all(0)


def weighted(weight_N: Tensor | None, value_N: Tensor) -> Tensor:
    """weight * value; 0 where the weight is 0, whatever the value; 0 without a weight."""
    if weight_N is None:
        return torch.zeros_like(value_N)
    weight_N = weight_N.to(value_N.dtype)
    return torch.where(weight_N != 0, weight_N * value_N, 0.0)


def join_terms(parts: list[TokenTerms]) -> TokenTerms:
    """The terms of consecutive parts, at least one."""
    if len(parts) == 1:
        return parts[0]
    return TokenTerms(*(torch.cat([getattr(part, name) for part in parts]) for name in TERMS))


def steady_sum(values_N: Tensor) -> Tensor:
    """values_N.sum(), 0-dim; on a CPU in an order that does not depend on the number of threads.

    Above a block on a CPU in float64, in sums of blocks, and rounded once.
    """
    if values_N.device.type != "cpu" or values_N.shape[0] <= BLOCK:
        return values_N.sum()
    sums_B = values_N.double()
    while sums_B.shape[0] > BLOCK:
        padded_B = torch.nn.functional.pad(sums_B, (0, -sums_B.shape[0] % BLOCK))
        sums_B = padded_B.view(-1, BLOCK).sum(1)
    return sums_B.sum().to(values_N.dtype)
