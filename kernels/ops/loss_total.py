"""The terms of all tokens as one number, by whichever backend they were made.

Shapes: N tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smopd.kernels.reference.loss import STATS_FIELDS, reverse_weight
from smopd.kernels.reference.policy import weighted
from smopd.kernels.types import LossSettings, LossStats, LossTokens, TokenTerms

BLOCK = 1024  # so few torch adds on one thread


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


def total_loss(terms: TokenTerms, tokens: LossTokens, settings: LossSettings) -> tuple[Tensor, LossStats]:
    """The terms summed: once over all tokens, not by chunks. Where a weight is 0 its term is, NaN too."""
    columns = {name: getattr(terms, name) for name in STATS_FIELDS if name.endswith("_N")}
    pg_loss = steady_sum(weighted(tokens.pg_weight_N, terms.surrogate_N))
    kl_loss = steady_sum(weighted(tokens.kl_weight_N, terms.kl_N))
    reverse_loss = steady_sum(weighted(reverse_weight(tokens), terms.reverse_N))
    entropy = steady_sum(weighted(tokens.ent_weight_N, terms.entropy_N))
    stats = LossStats(**columns, pg_loss=pg_loss, kl_loss=kl_loss, entropy=entropy, reverse_loss=reverse_loss)
    loss = pg_loss.clone()
    if settings.opd_coef != 0.0:
        loss = loss + settings.opd_coef * (kl_loss + reverse_loss)
    if settings.entropy_coef != 0.0:
        loss = loss - settings.entropy_coef * entropy
    return loss, stats
