"""smopd_loss in plain PyTorch: a token's whole objective and its gradient, from one softmax of its row.

    loss = sum_n pg_weight_n surrogate_n + opd_coef (sum_n kl_weight_n kl_n + sum_n reverse_weight_n
    reverse_n)
         - entropy_coef sum_n ent_weight_n entropy_n

The gradient is computed with the loss (closed forms, reference_rows.py); backward only scales it.

Shapes: N tokens, V vocabulary, S support entries (kappa).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from smopd.kernels.reference import teacher_mixture
from smopd.kernels.reference_policy import policy_terms, weighted
from smopd.kernels.reference_rows import (
    Target,
    prepare_target,
    row_chunks,
    rows_forward,
    rows_gradient,
)
from smopd.kernels.types import LossSettings, LossStats, LossTokens, compute_dtype

STATS_FIELDS = tuple(field.name for field in fields(LossStats))


@dataclass(frozen=True)
class TokenTerms:
    """One chunk's values per token, (N,) each: LossStats' columns and the unweighted terms."""

    logp_N: Tensor
    entropy_N: Tensor
    kl_N: Tensor
    teacher_mass_N: Tensor
    student_mass_N: Tensor
    clipped_N: Tensor
    surrogate_N: Tensor
    reverse_N: Tensor


def loss_rows(
    logits_NV: Tensor, tokens: LossTokens, settings: LossSettings, *, gradient: bool
) -> tuple[TokenTerms, Tensor | None]:
    """The terms of a chunk of tokens and, if asked, the loss's gradient in their logits (compute dtype)."""
    dtype = compute_dtype(logits_NV.dtype)
    target = _target(tokens, settings, dtype)
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
    surrogate_N, slope_N, reverse_N, reverse_slope_N, clipped_N = policy_terms(rows.logp_N, tokens, settings)
    zero_N = torch.zeros_like(rows.logp_N)
    terms = TokenTerms(
        logp_N=rows.logp_N,
        entropy_N=zero_N if rows.entropy_N is None else rows.entropy_N,
        kl_N=zero_N if kl_rows.kl_N is None else kl_rows.kl_N,
        teacher_mass_N=zero_N if target is None else target.mass_N,
        student_mass_N=zero_N if kl_rows.student_mass_N is None else kl_rows.student_mass_N,
        clipped_N=clipped_N,
        surrogate_N=surrogate_N,
        reverse_N=reverse_N,
    )
    if not gradient:
        return terms, None

    reverse_weight_N = None if tokens.reverse_adv_N is None else _reverse_weight(tokens)
    coefs_N = {
        "pg": tokens.pg_weight_N.to(dtype),
        "kl": _scaled(None if target is None else tokens.kl_weight_N, settings.opd_coef, dtype),
        "reverse": _scaled(reverse_weight_N, settings.opd_coef, dtype),
        "entropy": _scaled(tokens.ent_weight_N, -settings.entropy_coef, dtype),
    }
    dlogp_N = weighted(coefs_N["pg"], slope_N) + weighted(coefs_N["reverse"], reverse_slope_N)
    if same:
        grad_NV = rows_gradient(rows, dlogp_N, coefs_N["kl"], coefs_N["entropy"])
    else:
        grad_NV = rows_gradient(rows, dlogp_N, None, coefs_N["entropy"])
        grad_NV += rows_gradient(kl_rows, None, coefs_N["kl"], None)
    # A token that counts nowhere has gradient 0 even where its logits are not finite.
    idle_N = torch.stack([coef_N == 0 for coef_N in coefs_N.values() if coef_N is not None]).all(0)
    if grad_NV.device.type != "cpu" or bool(idle_N.any()):  # asking costs a synchronisation elsewhere
        grad_NV.masked_fill_(idle_N[:, None], 0.0)
    return terms, grad_NV


def _scaled(weight_N: Tensor | None, coef: float, dtype: torch.dtype) -> Tensor | None:
    """coef * weight, or None where the term is off altogether and costs nothing."""
    return None if weight_N is None or coef == 0.0 else coef * weight_N.to(dtype)


def _target(tokens: LossTokens, settings: LossSettings, dtype: torch.dtype) -> Target | None:
    ids_NS, logps_NS = tokens.target_ids_NS, tokens.target_logps_NS
    if (
        tokens.teacher_ids_NMS is not None
        and tokens.teacher_logps_NMS is not None
        and tokens.log_alpha is not None
    ):
        mixture = teacher_mixture(
            tokens.teacher_ids_NMS,
            tokens.teacher_logps_NMS,
            tokens.log_alpha,
            settings.kappa,
            merge=settings.merge,
        )
        ids_NS, logps_NS = mixture.ids_NS, mixture.logps_NS
    if ids_NS is None or logps_NS is None:
        return None
    distinct = tokens.teacher_ids_NMS is not None and settings.merge
    return prepare_target(ids_NS, logps_NS, dtype, merge=settings.tail, distinct=distinct)


def _reverse_weight(tokens: LossTokens) -> Tensor | None:
    return tokens.kl_weight_N if tokens.reverse_weight_N is None else tokens.reverse_weight_N


def total_loss(
    parts: list[TokenTerms], tokens: LossTokens, settings: LossSettings, reference_N: Tensor
) -> tuple[Tensor, LossStats]:
    """Join the chunks' terms and sum them once, so that the loss does not depend on the chunks.

    reference_N: any (N, ...) tensor of the logits' dtype and device, for the case of no chunk at all.
    """

    def join(name: str) -> Tensor:
        if parts:
            return torch.cat([getattr(part, name) for part in parts])
        dtype = torch.int8 if name == "clipped_N" else compute_dtype(reference_N.dtype)
        return torch.zeros(0, dtype=dtype, device=reference_N.device)

    columns = {name: join(name) for name in STATS_FIELDS if name.endswith("_N")}
    pg_loss = weighted(tokens.pg_weight_N, join("surrogate_N")).sum()
    kl_loss = weighted(tokens.kl_weight_N, columns["kl_N"]).sum()
    reverse_loss = weighted(_reverse_weight(tokens), join("reverse_N")).sum()
    entropy = weighted(tokens.ent_weight_N, columns["entropy_N"]).sum()
    stats = LossStats(**columns, pg_loss=pg_loss, kl_loss=kl_loss, entropy=entropy, reverse_loss=reverse_loss)
    loss = pg_loss.clone()
    if settings.opd_coef != 0.0:
        loss = loss + settings.opd_coef * (kl_loss + reverse_loss)
    if settings.entropy_coef != 0.0:
        loss = loss - settings.entropy_coef * entropy
    return loss, stats


def flat_stats(stats: LossStats) -> tuple[Tensor, ...]:
    """LossStats as the tuple that an autograd.Function can return."""
    return tuple(getattr(stats, name) for name in STATS_FIELDS)


def loss_terms(
    logits_NV: Tensor, tokens: LossTokens, settings: LossSettings, grad_NV: Tensor | None
) -> list[TokenTerms]:
    """All rows, by chunks; the gradient goes to grad_NV if given, which may be the logits themselves."""
    parts = []
    for start, stop in row_chunks(logits_NV):
        chunk = tokens.rows(start, stop)
        terms, grad_chunk_NV = loss_rows(logits_NV[start:stop], chunk, settings, gradient=grad_NV is not None)
        parts.append(terms)
        if grad_NV is not None and grad_chunk_NV is not None:
            grad_NV[start:stop] = grad_chunk_NV
    return parts


def scaled_gradient(grad: Tensor, dloss: Tensor) -> Tensor:
    """grad * dloss; the saved tensor itself where dloss is 1 and asking costs no synchronisation."""
    if dloss.device.type == "cpu" and dloss.item() == 1.0:
        return grad
    return grad * dloss.to(grad.dtype)


class _Loss(torch.autograd.Function):
    """Functional: keeps the gradient beside the logits, in their dtype."""

    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, tokens: LossTokens, settings: LossSettings
    ) -> tuple[Tensor, ...]:
        grad_NV = torch.empty_like(logits_NV)
        loss, stats = total_loss(
            loss_terms(logits_NV, tokens, settings, grad_NV), tokens, settings, logits_NV
        )
        ctx.save_for_backward(grad_NV)
        ctx.mark_non_differentiable(*flat_stats(stats))
        return loss, *flat_stats(stats)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor, *_: Tensor) -> tuple[Tensor, None, None]:
        (grad_NV,) = ctx.saved_tensors
        return scaled_gradient(grad_NV, dloss), None, None


class _LossInPlace(torch.autograd.Function):
    """Writes the gradient over the logits and returns them dirty, which rebases their history on this node.

    owner is the tensor that owns the logits' memory (a view cannot be marked dirty beside other outputs);
    layout is the logits' (size, stride, offset) in it.
    """

    @staticmethod
    def forward(
        ctx: Any, owner: Tensor, layout: tuple, tokens: LossTokens, settings: LossSettings
    ) -> tuple[Tensor, ...]:
        logits_NV = owner.as_strided(*layout)
        parts = loss_terms(logits_NV, tokens, settings, logits_NV)
        loss, stats = total_loss(parts, tokens, settings, logits_NV)
        ctx.mark_dirty(owner)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(owner)
        ctx.spent = False
        ctx.mark_non_differentiable(*flat_stats(stats))
        return loss, owner, *flat_stats(stats)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dloss: Tensor | None, downer: Tensor | None, *_: Tensor
    ) -> tuple[Tensor | None, ...]:
        if downer is not None:
            raise RuntimeError(
                "smopd_loss: logits_NV was used in another differentiable operation after inplace=True; "
                "it holds the gradient then, expected no use of it"
            )
        if ctx.spent:
            raise RuntimeError(
                "smopd_loss: a second backward came through inplace=True, expected one; "
                "the logits' memory held the only copy of the gradient; use inplace=False"
            )
        ctx.spent = True
        if dloss is None:
            return None, None, None, None
        grad = ctx.saved_tensors[0].detach()
        if dloss.device.type != "cpu" or dloss.item() != 1.0:
            grad.mul_(dloss.to(grad.dtype))
        return grad, None, None, None


def smopd_loss(
    logits_NV: Tensor,
    tokens: LossTokens,
    settings: LossSettings,
    *,
    inplace: bool = False,
) -> tuple[Tensor, LossStats]:
    if not (torch.is_grad_enabled() and logits_NV.requires_grad):
        parts = loss_terms(logits_NV.detach(), tokens, settings, None)
        return total_loss(parts, tokens, settings, logits_NV.detach())
    if not inplace:
        loss, *flat = _Loss.apply(logits_NV, tokens, settings)
        return loss, LossStats(*flat)
    owner = _owner(logits_NV)
    layout = (logits_NV.size(), logits_NV.stride(), logits_NV.storage_offset())
    loss, _, *flat = _LossInPlace.apply(owner, layout, tokens, settings)
    return loss, LossStats(*flat)


def _owner(logits_NV: Tensor) -> Tensor:
    owner = logits_NV._base if logits_NV._is_view() and logits_NV._base is not None else logits_NV
    if owner.is_leaf or logits_NV.is_leaf:
        raise ValueError(
            "smopd_loss: logits_NV is a leaf, expected the output of an operation for inplace=True"
        )
    if owner.numel() != logits_NV.numel() or owner.dtype != logits_NV.dtype:
        raise ValueError(
            f"smopd_loss: logits_NV is a view of {logits_NV.numel()} of the {owner.numel()} elements of a "
            f"tensor of shape {tuple(owner.shape)}, "
            "expected a whole tensor or a view of all of it for inplace=True"
        )
    return owner
