"""The operations' truth: dense distributions in float64 and autograd, a few rows at a time.

Shapes: n rows of a chunk, V vocabulary, M teachers, S support entries (kappa).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from smopd.ops import LossSettings, LossTokens

TAIL_FLOOR = 2.0**-20  # the teachers' tail below this counts as none


@dataclass(frozen=True)
class Exact:
    """Per row: the terms, each (n,); with a gradient also it and the size of what it is the difference of."""

    logp: Tensor
    entropy: Tensor
    kl: Tensor
    surrogate: Tensor
    weighted: Tensor
    gradient: Tensor | None = None
    scale: Tensor | None = None


def take(tokens: LossTokens, rows: Tensor | slice) -> LossTokens:
    """The tokens of these rows; log_alpha is shared by all."""
    columns = {
        field.name: getattr(tokens, field.name)
        for field in dataclasses.fields(tokens)
        if field.name != "log_alpha" and getattr(tokens, field.name) is not None
    }
    return dataclasses.replace(tokens, **{name: value[rows] for name, value in columns.items()})


def mixture(ids: Tensor, logps: Tensor, log_alpha: Tensor, kappa: int, merge: bool) -> tuple[Tensor, Tensor]:
    """(n, kappa) ids and log-probabilities, by descending value; equal ids joined first if merge."""
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


def exact(logits: Tensor, tokens: LossTokens, settings: LossSettings, *, gradient: bool = False) -> Exact:
    """The objective of smopd_loss (with opd_coef, entropy_coef) without dual clip and reverse term."""
    logits = logits.detach().double().requires_grad_(gradient)
    with torch.set_grad_enabled(gradient):
        logq = (logits / settings.temperature).log_softmax(-1)
        logp = logq.gather(-1, tokens.token_ids_N.long()[:, None])[:, 0]
        entropy = -(logq.exp() * logq).nan_to_num(0.0).sum(-1)
        surrogate, slope = _surrogate(logp, tokens, settings)
        kl, q_dense = _forward_kl(logits, tokens, settings)
        weights = [tokens.pg_weight_N, tokens.kl_weight_N, tokens.ent_weight_N]
        pg_w, kl_w, ent_w = (torch.zeros_like(logp) if w is None else w.to(logp.dtype) for w in weights)
        kl_w, ent_w = kl_w * settings.opd_coef, ent_w * settings.entropy_coef
        weighted = pg_w * surrogate + kl_w * kl - ent_w * entropy
    result = Exact(*(value.detach() for value in (logp, entropy, kl, surrogate, weighted)))
    if not gradient:
        return result
    (grad,) = torch.autograd.grad(weighted.sum(), logits)
    p = logq.detach().exp()
    size = torch.stack([pg_w, kl_w, ent_w]).abs().amax(0)[:, None]
    scale = size * (p + q_dense + slope.detach().abs()[:, None])
    scale = scale + (ent_w[:, None] * p * (logq.detach().abs() + entropy.detach()[:, None])).nan_to_num(0.0)
    return dataclasses.replace(result, gradient=grad, scale=scale)


def _surrogate(logp: Tensor, tokens: LossTokens, settings: LossSettings) -> tuple[Tensor, Tensor]:
    old = logp.detach() if tokens.old_logp_N is None else tokens.old_logp_N.to(logp.dtype)
    ratio = (logp - old).clamp(-20.0, 20.0).exp()
    adv = tokens.adv_N.to(logp.dtype)
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return -torch.minimum(ratio * adv, clipped * adv), adv * ratio


def _forward_kl(logits: Tensor, tokens: LossTokens, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """(n,) the KL, and (n, V) the target's masses."""
    ids, logps = tokens.target_ids_NS, tokens.target_logps_NS
    if tokens.teacher_ids_NMS is not None:
        teachers = (tokens.teacher_ids_NMS, tokens.teacher_logps_NMS, tokens.log_alpha)
        ids, logps = mixture(*teachers, settings.kappa, settings.merge)
    q_dense = torch.zeros_like(logits)
    if ids is None or logps is None:
        return torch.zeros_like(logits[:, 0]), q_dense
    ids, logps = ids.long(), logps.to(logits.dtype)
    q = logps.exp()
    q_dense = q_dense.scatter_add(-1, ids, q)
    logq = (logits / settings.kl_temperature).log_softmax(-1)
    if not settings.tail:
        return torch.where(q > 0, q * (logps - logq.gather(-1, ids)), 0.0).sum(-1), q_dense
    kl = torch.where(q_dense > 0, q_dense * (q_dense.clamp(min=1e-300).log() - logq), 0.0).sum(-1)
    rest = 1.0 - q_dense.sum(-1)
    outside = logq.masked_fill(torch.zeros_like(logq).scatter(-1, ids, 1.0) > 0, -torch.inf).logsumexp(-1)
    tail = rest.clamp(min=TAIL_FLOOR) * (rest.clamp(min=TAIL_FLOOR).log() - outside)
    return kl + torch.where(rest >= TAIL_FLOOR, tail, 0.0), q_dense
