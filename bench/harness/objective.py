"""Independent definition of the operations by dense distributions and autograd, for benchmarks and tests.

It shares no code with smopd.kernels. Shapes: n rows of a chunk, V vocabulary, M teachers, S support entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from smopd.ops import LossSettings, LossTokens

TAIL_FLOOR = 2.0**-20  # a smaller tail of the teachers counts as 0


@dataclass(frozen=True)
class Terms:
    """The terms of smopd_loss and their weighted sum, (n,) each and differentiable in the logits.

    slope: magnitude of the surrogate's slope in logp. q_dense: (n, V) masses of the target.
    """

    logp: Tensor
    entropy: Tensor
    kl: Tensor
    surrogate: Tensor
    reverse: Tensor
    weighted: Tensor
    teacher_mass: Tensor
    student_mass: Tensor
    slope: Tensor
    q_dense: Tensor


def mixture(ids: Tensor, logps: Tensor, log_alpha: Tensor, kappa: int, merge: bool) -> tuple[Tensor, Tensor]:
    """Return (n, kappa) ids and descending log-probabilities. If `merge`, join equal ids first."""
    pool = (logps.double() + log_alpha.double().expand(ids.shape[:2])[..., None]).flatten(1)
    ids = ids.flatten(1).long()
    if merge:
        same = ids[:, :, None] == ids[:, None, :]
        joined = torch.where(same, pool[:, None, :], -torch.inf).logsumexp(-1)
        repeated = (same & torch.ones_like(same[0]).tril(-1)).any(-1)
        pool = joined.masked_fill(repeated, -torch.inf)
        ids, order = ids.sort(dim=-1, stable=True)  # ties go to the lower id
        pool = pool.gather(-1, order)
    pool, order = pool.sort(dim=-1, descending=True, stable=True)
    return ids.gather(-1, order)[:, :kappa], pool[:, :kappa]


def terms(logits: Tensor, tokens: LossTokens, settings: LossSettings) -> Terms:
    """Compute the terms in the logits' dtype."""
    logq = (logits / settings.temperature).log_softmax(-1)
    logp = logq.gather(-1, tokens.token_ids_N.long()[:, None])[:, 0]
    entropy = -(logq.exp() * logq).nan_to_num(0.0).sum(-1)
    zero = torch.zeros_like(logp)

    def column(value: Tensor | None) -> Tensor:
        return zero if value is None else value.to(logits.dtype)

    old = logp.detach() if tokens.old_logp_N is None else tokens.old_logp_N.to(logits.dtype)
    ratio = (logp - old).clamp(-20.0, 20.0).exp()
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    adv, reverse_adv = column(tokens.adv_N), column(tokens.reverse_adv_N)
    surrogate = -torch.minimum(ratio * adv, clipped * adv)
    if settings.dual_clip is not None:
        surrogate = torch.where(adv < 0, torch.minimum(surrogate, -settings.dual_clip * adv), surrogate)
    reverse = -clipped * reverse_adv
    if settings.reverse_kl_surrogate == "ppo":
        reverse = -torch.minimum(ratio * reverse_adv, clipped * reverse_adv)

    kl, q_dense, student_mass = zero, torch.zeros_like(logits), zero
    target = _target(tokens, settings)
    if target is not None:
        kl_logq = (logits / settings.kl_temperature).log_softmax(-1)
        kl, q_dense, student_mass = forward_kl(kl_logq, *target, settings.tail)
    kl_weight = column(tokens.kl_weight_N)
    reverse_weight = kl_weight if tokens.reverse_weight_N is None else column(tokens.reverse_weight_N)
    weighted = (
        column(tokens.pg_weight_N) * surrogate
        + settings.opd_coef * (kl_weight * kl + reverse_weight * reverse)
        - settings.entropy_coef * column(tokens.ent_weight_N) * entropy
    )
    masses = (q_dense.sum(-1), student_mass)
    return Terms(logp, entropy, kl, surrogate, reverse, weighted, *masses, (adv * ratio).abs(), q_dense)


def _target(tokens: LossTokens, settings: LossSettings) -> tuple[Tensor, Tensor] | None:
    if tokens.teacher_ids_NMS is not None:
        teachers = (tokens.teacher_ids_NMS, tokens.teacher_logps_NMS, tokens.log_alpha)
        return mixture(*teachers, settings.kappa, settings.merge)
    if tokens.target_ids_NS is not None and tokens.target_logps_NS is not None:
        return tokens.target_ids_NS, tokens.target_logps_NS
    return None


def forward_kl(logq: Tensor, ids: Tensor, logps: Tensor, tail: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the (n,) KL, the target's (n, V) masses and the student's (n,) mass on the support."""
    live = logps > -torch.inf
    ids, logps = ids.long().masked_fill(~live, 0), logps.to(logq.dtype)
    q = logps.exp()
    q_dense = torch.zeros_like(logq).scatter_add(-1, ids, q)
    inside = torch.zeros_like(logq).scatter_add(-1, ids, live.to(logq.dtype)) > 0
    student_mass = torch.where(inside, logq.exp(), 0.0).sum(-1)
    if not tail:
        kl = torch.where(q > 0, q * (logps - logq.gather(-1, ids)), 0.0).sum(-1)
        return kl, q_dense, student_mass
    kl = torch.where(q_dense > 0, q_dense * (q_dense.clamp(min=1e-300).log() - logq), 0.0).sum(-1)
    rest = 1.0 - q_dense.sum(-1)
    outside = logq.masked_fill(inside, -torch.inf).logsumexp(-1)
    off = rest.clamp(min=TAIL_FLOOR) * (rest.clamp(min=TAIL_FLOOR).log() - outside)
    return kl + torch.where(rest >= TAIL_FLOOR, off, 0.0), q_dense, student_mass


def exact(logits: Tensor, tokens: LossTokens, settings: LossSettings) -> tuple[Terms, Tensor, Tensor]:
    """Return the float64 terms, the gradient of the logits, and the size of the gradient's terms."""
    logits = logits.detach().double().requires_grad_()
    part = terms(logits, tokens, settings)
    (gradient,) = torch.autograd.grad(part.weighted.sum(), logits)
    part = Terms(**{name: value.detach() for name, value in vars(part).items()})
    logq = (logits.detach() / settings.temperature).log_softmax(-1)
    p, zero = logq.exp(), torch.zeros_like(part.logp)
    weights = [tokens.pg_weight_N, tokens.kl_weight_N, tokens.ent_weight_N]
    pg_w, kl_w, ent_w = (zero if w is None else w.to(zero.dtype) for w in weights)
    kl_w, ent_w = kl_w * settings.opd_coef, ent_w * settings.entropy_coef
    size = torch.stack([pg_w, kl_w, ent_w]).abs().amax(0)[:, None]
    scale = size * (p + part.q_dense + part.slope[:, None])
    scale = scale + (ent_w[:, None] * p * (logq.abs() + part.entropy[:, None])).nan_to_num(0.0)
    return part, gradient, scale
