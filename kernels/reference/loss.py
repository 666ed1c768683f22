"""smopd_loss in plain PyTorch: a token's whole objective and its gradient, from one softmax of its row.

    loss = sum_n pg_weight_n surrogate_n
         + opd_coef (sum_n kl_weight_n kl_n + sum_n reverse_weight_n reverse_n)
         - entropy_coef sum_n ent_weight_n entropy_n

The gradient is computed with the loss, by the closed forms of reference/rows.py.

Shapes: N tokens, V vocabulary, S support entries (kappa).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from smopd.kernels.reference.rows import row_chunks, rows_forward, rows_gradient
from smopd.kernels.reference.topk import target_of
from smopd.kernels.terms import token_terms
from smopd.kernels.tokens import STATS_FIELDS, counted, join_terms, reverse_weight, steady_sum, weighted
from smopd.kernels.types import LossSettings, LossStats, LossTokens, TokenTerms, compute_dtype, loss_target


def loss_rows(
    logits_NV: Tensor, tokens: LossTokens, settings: LossSettings, grad_NV: Tensor | None
) -> TokenTerms:
    """Every token's terms; the loss's gradient goes to grad_NV if given, which may be the logits."""
    parts, tokens = [], _without_uncounted_ids(tokens)
    for start, stop in row_chunks(logits_NV):
        chunk = slice(start, stop)
        terms, grad_chunk_NV = _chunk(
            logits_NV[chunk], tokens.rows(start, stop), settings, gradient=grad_NV is not None
        )
        parts.append(terms)
        if grad_NV is not None and grad_chunk_NV is not None:
            grad_NV[chunk] = grad_chunk_NV
    return join_terms(parts, logits_NV)


def _without_uncounted_ids(tokens: LossTokens) -> LossTokens:
    """A token that counts nowhere may have any id: 0 takes its place."""
    uncounted_N = ~counted(tokens)

    names = ("token_ids_N", "target_ids_NS", "teacher_ids_NMS")
    given: dict[str, Tensor] = {name: ids for name in names if (ids := getattr(tokens, name)) is not None}
    known = {
        name: ids.masked_fill(uncounted_N.view(-1, *[1] * (ids.dim() - 1)), 0) for name, ids in given.items()
    }
    return replace(tokens, **known)


def _chunk(
    logits_NV: Tensor, tokens: LossTokens, settings: LossSettings, *, gradient: bool
) -> tuple[TokenTerms, Tensor | None]:
    """The terms of a chunk of tokens and, if asked, the loss's gradient in their logits (compute dtype)."""
    dtype = compute_dtype(logits_NV.dtype)
    given = loss_target(tokens, settings)
    target = None if given is None else target_of(given, dtype, tail=settings.tail)
    same = settings.temperature == settings.kl_temperature or target is None
    rows = rows_forward(
        logits_NV,
        tokens.token_ids_N,
        target if same else None,
        temperature=settings.temperature,
        tail=settings.tail,
        entropy=True,
        entropy_gradient=settings.entropy_coef != 0.0,
        gradient=gradient,
    )
    kl_rows = rows
    if not same:
        kl_rows = rows_forward(
            logits_NV,
            tokens.token_ids_N,
            target,
            temperature=settings.kl_temperature,
            tail=settings.tail,
            gradient=gradient,
        )
    mass_N = None if target is None else target.mass_N
    terms, pull, idle_N = token_terms(
        tokens, settings, rows.logp_N, rows.entropy_N, kl_rows.kl_N, mass_N, kl_rows.student_mass_N
    )
    if not gradient:
        return terms, None
    if same:
        grad_NV = rows_gradient(rows, pull.logp_N, pull.kl_N, pull.entropy_N)
    else:
        grad_NV = rows_gradient(rows, pull.logp_N, None, pull.entropy_N)
        grad_NV += rows_gradient(kl_rows, None, pull.kl_N, None)
    if grad_NV.device.type != "cpu" or bool(idle_N.any()):  # asking costs a synchronisation elsewhere
        grad_NV.masked_fill_(idle_N[:, None], 0.0)
    return terms, grad_NV


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


def scale_(grad: Tensor, dloss: Tensor, out: Tensor | None = None) -> None:
    """grad * dloss into out (None: grad), rounded once: the factor itself is not brought to grad's dtype."""
    if out is not None:
        torch.mul(grad.to(compute_dtype(grad.dtype)), dloss, out=out)
    elif dloss.device.type != "cpu":
        grad.copy_(grad.to(compute_dtype(grad.dtype)) * dloss)
    elif dloss.item() != 1.0:
        grad.mul_(dloss.item())
