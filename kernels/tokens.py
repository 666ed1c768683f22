"""Helpers for the loss of N tokens: effective weights, and sums that do not depend on the thread count."""

from dataclasses import fields

import torch
from torch import Tensor

from smopd.kernels.types import LossSettings, LossStats, LossTokens, TokenTerms, loss_target

STATS_FIELDS = tuple(field.name for field in fields(LossStats))
TERMS = tuple(field.name for field in fields(TokenTerms))
BLOCK = 1024  # torch uses one thread for a sum of at most this many numbers


def counted(tokens: LossTokens) -> Tensor:
    """Return whether each token has a nonzero weight, (N,) bool."""
    weights = (tokens.pg_weight_N, tokens.kl_weight_N, tokens.ent_weight_N, tokens.reverse_weight_N)
    return torch.stack([weight_N != 0 for weight_N in weights if weight_N is not None]).any(0)


def reverse_weight(tokens: LossTokens) -> Tensor | None:
    return tokens.kl_weight_N if tokens.reverse_weight_N is None else tokens.reverse_weight_N


def coefficients(tokens: LossTokens, settings: LossSettings, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
    """Return each token's factors of surrogate, KL, reverse term and entropy (None if the term is off)."""

    def scaled(weight_N: Tensor | None, coef: float, enabled: bool = True) -> Tensor | None:
        return None if weight_N is None or coef == 0.0 or not enabled else coef * weight_N.to(dtype)

    return (
        scaled(tokens.pg_weight_N, 1.0),
        scaled(tokens.kl_weight_N, settings.opd_coef, loss_target(tokens, settings) is not None),
        scaled(reverse_weight(tokens), settings.opd_coef, tokens.reverse_adv_N is not None),
        scaled(tokens.ent_weight_N, -settings.entropy_coef),
    )


def idle(coefs: tuple[Tensor | None, ...]) -> Tensor:
    """Return whether all factors of each token are 0, (N,) bool. The gradient of such a token is 0."""
    return torch.stack([coef_N == 0 for coef_N in coefs if coef_N is not None]).all(0)


def weighted(weight_N: Tensor | None, value_N: Tensor) -> Tensor:
    """Return weight * value. A weight of None or 0 gives 0, even if the value is NaN."""
    if weight_N is None:
        return torch.zeros_like(value_N)
    weight_N = weight_N.to(value_N.dtype)
    return torch.where(weight_N != 0, weight_N * value_N, 0.0)


def join_terms(parts: list[TokenTerms]) -> TokenTerms:
    if len(parts) == 1:
        return parts[0]
    return TokenTerms(*(torch.cat([getattr(part, name) for part in parts]) for name in TERMS))


def steady_sum(values_N: Tensor) -> Tensor:
    """Return values_N.sum(). On a CPU, its bits do not depend on the number of threads.

    On a CPU, more than BLOCK values are summed in float64, block by block, and rounded once.
    """
    if values_N.device.type != "cpu" or values_N.shape[0] <= BLOCK:
        return values_N.sum()
    sums_B = values_N.double()
    while sums_B.shape[0] > BLOCK:
        padded_B = torch.nn.functional.pad(sums_B, (0, -sums_B.shape[0] % BLOCK))
        sums_B = padded_B.view(-1, BLOCK).sum(1)
    return sums_B.sum().to(values_N.dtype)
