"""The teachers' mixture as a sparse target, and the forward KL to a sparse target, which uses loss_rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from smopd.kernels import checks, dispatch
from smopd.kernels.ops.library import empty_column, operator
from smopd.kernels.ops.loss import serving_rows
from smopd.kernels.types import LossSettings, LossTokens, Mixture

OP = "topk_forward_kl"


def teacher_mixture(
    ids_NMS: Tensor, logps_NMS: Tensor, log_alpha: Tensor, kappa: int, *, merge: bool = False
) -> Mixture:
    """Keep the kappa candidates of all teachers with the largest log alpha + log p (Eq. 6).

    merge=True first merges equal ids by logsumexp, which gives the exact mixture of the candidates (Eq. 5).
    merge=False keeps repeats, as the paper does. Neither result is renormalised or differentiable. With
    merge, ties go to the lower id. Without it, they go to the lower teacher, then to its earlier entry.

    Args:
        ids_NMS: (N, M, S) int32 or int64. An empty slot may have any id.
        logps_NMS: (N, M, S) in nats. -inf marks an empty slot.
        log_alpha: (M,), (N, M) or broadcastable, in nats. -inf turns a teacher off.
        kappa: number of entries per token in the result, at least 0.
    Returns:
        Mixture: int32 ids (N, kappa), descending logps (N, kappa), mass (N,). Empty slots are 0 and -inf.
    """
    op = "teacher_mixture"
    checks.check_teachers(op, ids_NMS, logps_NMS, log_alpha)
    checks.check_kappa(op, kappa)
    return Mixture(*_teacher_mixture(ids_NMS, logps_NMS.detach(), log_alpha.detach(), kappa, merge))


@operator(
    "teacher_mixture",
    "(Tensor ids, Tensor logps, Tensor log_alpha, SymInt kappa, bool merge)"
    " -> (Tensor ids, Tensor logps, Tensor mass)",
)
def _teacher_mixture(
    ids: Tensor, logps: Tensor, log_alpha: Tensor, kappa: int, merge: bool
) -> tuple[Tensor, Tensor, Tensor]:
    serve = dispatch.serving("teacher_mixture", logps, n_pooled=ids.shape[1] * ids.shape[2])
    mixture = serve(ids, logps, log_alpha, kappa, merge=merge)
    return mixture.ids_NS, mixture.logps_NS, mixture.mass_N


@_teacher_mixture.register_fake
def _fake(ids: Tensor, logps: Tensor, log_alpha: Tensor, kappa: int, merge: bool) -> tuple[Tensor, ...]:
    n_rows = ids.shape[0]
    out_ids = empty_column(ids, n_rows, kappa, dtype=torch.int32)
    return out_ids, empty_column(logps, n_rows, kappa), empty_column(logps, n_rows)


def topk_forward_kl(
    logits_NV: Tensor,
    token_ids_N: Tensor,
    target_ids_NS: Tensor,
    target_logps_NS: Tensor,
    *,
    tail: bool = False,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """For each token, compute the log-probability and the forward KL to a sparse target, in one pass.

    The result equals

        logq_NV = (logits_NV.float() / temperature).log_softmax(-1)
        logp_N  = logq_NV.gather(-1, token_ids_N[:, None])[:, 0]
        kl_N    = (target_logps_NS.exp() * (target_logps_NS - logq_NV.gather(-1, target_ids_NS))).sum(-1)

    kl_N is the summand of Eq. 7. The target is not renormalised or clamped, and repeats are kept, so kl_N can
    be negative. If the student's logp of a target id is -inf, kl_N is infinite. The gradient is

        dlogits_v = (1/T) [dkl (Q p_v - sum_{s: v_s = v} q_s) + dlogp ([v = y] - p_v)],  Q = sum_s q_s

    tail=True merges repeats and adds a bucket for the tokens outside the support. The target's mass in this
    bucket is q_r = 1 - Q, or 0 if that is below 2^-20. The student's mass in it is p_r. kl_N is then a true
    KL, with gradient p_v - q_v on the support and p_v (1 - q_r / p_r) outside.

    Args:
        logits_NV: (N, V), unit stride along V.
        token_ids_N: (N,) int32 or int64 in [0, V).
        target_ids_NS: (N, S) int32 or int64 in [0, V). An empty slot may have any id.
        target_logps_NS: (N, S) in nats, including log alpha. -inf marks an empty slot.
    Returns:
        logp_N, kl_N: (N,) in nats, differentiable (once) in logits_NV only.
    """
    like = ("logits_NV", logits_NV)
    checks.check_logits(OP, logits_NV)
    checks.check_token_ids(OP, token_ids_N, like)
    checks.check_target(OP, target_ids_NS, target_logps_NS, like)
    checks.check_temperature(OP, temperature)
    target = (target_ids_NS, target_logps_NS.detach())
    return _forward_kl(logits_NV, token_ids_N, *target, tail, float(temperature))


def _objective(inputs: Sequence[Any], dlogp: Tensor, dkl: Tensor) -> tuple[LossTokens, LossSettings]:
    """Return a loss with the gradient of sum(dlogp logp + dkl kl). adv = -1 gives the surrogate slope 1."""
    token_ids, ids, logps, tail, temperature = inputs
    tokens = LossTokens(
        token_ids_N=token_ids,
        adv_N=torch.full_like(dlogp, -1.0),
        pg_weight_N=dlogp,
        kl_weight_N=dkl,
        target_ids_NS=ids,
        target_logps_NS=logps,
    )
    return tokens, LossSettings(tail=tail, temperature=temperature, kl_temperature=temperature)


_SCHEMA = "Tensor logits, Tensor token_ids, Tensor ids, Tensor logps, bool tail, float temperature"


@operator("forward_kl", f"({_SCHEMA}) -> (Tensor logp, Tensor kl)", n_leaves=1)
def _forward_kl(logits: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
    ones = empty_column(logits, logits.shape[0]).fill_(1.0)
    tokens, settings = _objective(inputs, ones, ones)
    checks.require_loss_ids(OP, tokens, settings, logits.shape[1])
    terms = serving_rows(logits, tokens, settings)(logits, tokens, settings, None, entropy=False)
    return terms.logp_N, terms.kl_N.clone()  # outputs of an operator may not share memory


@_forward_kl.register_fake
def _(logits: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_column(logits, logits.shape[0]), empty_column(logits, logits.shape[0])


@operator("forward_kl_gradient", f"({_SCHEMA}, Tensor dlogp, Tensor dkl) -> Tensor")
def _forward_kl_gradient(logits: Tensor, *arguments: Any) -> Tensor:
    *inputs, dlogp, dkl = arguments
    tokens, settings = _objective(inputs, dlogp, dkl)
    grad = torch.empty_like(logits)
    serving_rows(logits, tokens, settings)(logits, tokens, settings, grad, entropy=False)
    return grad


@_forward_kl_gradient.register_fake
def _(logits: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(logits)


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.options = inputs[4:]


@once_differentiable
def _backward(ctx: Any, dlogp: Tensor, dkl: Tensor) -> tuple:
    return _forward_kl_gradient(*ctx.saved_tensors, *ctx.options, dlogp, dkl), *[None] * 5


_forward_kl.register_autograd(_backward, setup_context=_setup)
