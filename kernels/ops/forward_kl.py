"""The student's forward KL to a sparse target, or to the mixture of its teachers. Differentiable once.

Shapes: N packed response tokens, V vocabulary, M teachers, S support entries (kappa).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from smopd.kernels import checks, dispatch
from smopd.kernels.ops.library import empty_column, operator, target_facts
from smopd.kernels.types import Candidates, KlOptions, SparseTarget

N_STATISTICS = 4  # of a row: (h, s) of all of it and of what is off the support (triton/rows.py)


def topk_forward_kl(
    logits_NV: Tensor,
    token_ids_N: Tensor,
    target_ids_NS: Tensor,
    target_logps_NS: Tensor,
    *,
    tail: bool = False,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each token and forward KL to a sparse target, in one vocabulary pass.

    Equals

        logq_NV = (logits_NV.float() / temperature).log_softmax(-1)
        logp_N  = logq_NV.gather(-1, token_ids_N[:, None])[:, 0]
        kl_N    = (target_logps_NS.exp() * (target_logps_NS - logq_NV.gather(-1, target_ids_NS))).sum(-1)

    kl_N is the summand of Eq. 7. The target is used as given: not renormalised, not clamped, repeats allowed,
    so it can be negative. Where the student is -inf and the target is not, it is infinite. With Q = sum_s
    q_s,

        dlogits_v = (1/T) [dkl (Q p_v - sum_{s: v_s = v} q_s) + dlogp ([v = y] - p_v)]

    tail=True merges repeats and adds one bucket for all that is outside the support, on both sides:
    q_r = 1 - Q (0 below 2^-20) and p_r, the student's mass off the support. A true KL, never negative but for
    rounding. The gradient is then p_v - q_v inside the support and p_v (1 - q_r / p_r) outside.

    Args:
        logits_NV: (N, V), unit stride along V.
        token_ids_N: (N,) int32 or int64 in [0, V).
        target_ids_NS: (N, S) int32 or int64 in [0, V) where the slot is not empty; S of at least 0.
        target_logps_NS: (N, S), nats, log alpha added. -inf marks an empty slot and adds nothing.
    Returns:
        logp_N, kl_N: (N,), nats; differentiable (once) in logits_NV only.
    Raises:
        TypeError, ValueError: a shape, dtype, device or stride above does not hold.
    """
    op = "topk_forward_kl"
    checks.check_logits(op, logits_NV)
    checks.check_token_ids(op, token_ids_N, ("logits_NV", logits_NV))
    checks.check_target(op, target_ids_NS, target_logps_NS, ("logits_NV", logits_NV))
    checks.check_temperature(op, temperature)
    if checks.debugging():
        checks.debug_finite(op, "logits_NV", logits_NV, allow_minus_inf=True)
        checks.debug_ids(op, "token_ids_N", token_ids_N, logits_NV.shape[1])
        checks.debug_target(op, "target_", target_ids_NS, target_logps_NS, logits_NV.shape[1])
    union = (target_ids_NS, target_logps_NS.detach(), None, 0, False)
    logp_N, kl_N, _ = _forward_kl(logits_NV, token_ids_N, *union, tail, float(temperature))
    return logp_N, kl_N


def teacher_forward_kl(
    logits_NV: Tensor,
    token_ids_N: Tensor,
    teacher_ids_NMS: Tensor,
    teacher_logps_NMS: Tensor,
    log_alpha: Tensor,
    kappa: int,
    *,
    merge: bool = False,
    tail: bool = False,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """topk_forward_kl with the target that teacher_mixture makes of the teachers.

    Args:
        logits_NV, token_ids_N, tail, temperature: as in topk_forward_kl.
        teacher_ids_NMS, teacher_logps_NMS, log_alpha, kappa, merge: as in teacher_mixture.
    Returns:
        logp_N, kl_N: (N,), nats; differentiable (once) in logits_NV only.
    Raises:
        TypeError, ValueError: an argument is not as said there.
    """
    op = "teacher_forward_kl"
    like = ("logits_NV", logits_NV)
    checks.check_logits(op, logits_NV)
    checks.check_token_ids(op, token_ids_N, like)
    checks.check_teachers(op, teacher_ids_NMS, teacher_logps_NMS, log_alpha, like, prefix="teacher_")
    checks.check_kappa(op, kappa)
    checks.check_temperature(op, temperature)
    if checks.debugging():
        checks.debug_finite(op, "logits_NV", logits_NV, allow_minus_inf=True)
        checks.debug_ids(op, "token_ids_N", token_ids_N, logits_NV.shape[1])
        checks.debug_target(op, "teacher_", teacher_ids_NMS, teacher_logps_NMS, logits_NV.shape[1])
    union = (teacher_ids_NMS, teacher_logps_NMS.detach(), log_alpha.detach(), kappa, merge)
    logp_N, kl_N, _ = _forward_kl(logits_NV, token_ids_N, *union, tail, float(temperature))
    return logp_N, kl_N


_KL_SCHEMA = (
    "Tensor logits, Tensor token_ids, Tensor ids, Tensor logps, Tensor? log_alpha, SymInt kappa, bool merge,"
    " bool tail, float temperature"
)


def _kl_of(
    ids: Tensor,
    logps: Tensor,
    log_alpha: Tensor | None,
    kappa: int,
    merge: bool,
    tail: bool,
    temperature: float,
) -> tuple[SparseTarget | Candidates, KlOptions]:
    """Without log_alpha ids and logps are a target (N, S), with it the teachers' candidates (N, M, S)."""
    options = KlOptions(tail=tail, temperature=temperature)
    if log_alpha is None:
        return SparseTarget(ids, logps), options
    return Candidates(ids, logps, log_alpha, kappa, merge), options


def _n_kept(logits: Tensor, target: SparseTarget | Candidates) -> int:
    """Numbers a row that the backend keeps for its gradient; the others read the row again."""
    backend = dispatch.backend_for("forward_kl_rows", logits, **target_facts(target))
    return N_STATISTICS if backend == "triton" else 0


@operator("forward_kl", f"({_KL_SCHEMA}) -> (Tensor logp, Tensor kl, Tensor statistics)", n_leaves=1)
def _forward_kl(logits: Tensor, token_ids: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """statistics: (4, N) for the gradient of a backend that keeps them, else (0, N)."""
    target, options = _kl_of(*rest)
    checks.require_token_ids("forward_kl", token_ids, logits.shape[1])
    checks.require_target_ids("forward_kl", target, logits.shape[1])
    serve = dispatch.serving("forward_kl_rows", logits, **target_facts(target))
    logp, kl, *kept = serve(logits, token_ids, target, options)
    statistics = kept[0] if kept else empty_column(logits, 0, logits.shape[0])
    # An operator's outputs share no memory; a backend's may.
    apart = kl.untyped_storage()._cdata != logp.untyped_storage()._cdata
    return logp, kl if apart else kl.clone(), statistics


@_forward_kl.register_fake
def _(logits: Tensor, token_ids: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    n_rows, n_kept = logits.shape[0], _n_kept(logits, _kl_of(*rest)[0])
    return empty_column(logits, n_rows), empty_column(logits, n_rows), empty_column(logits, n_kept, n_rows)


@operator("forward_kl_gradient", f"({_KL_SCHEMA}, Tensor statistics, Tensor? dlogp, Tensor? dkl) -> Tensor")
def _forward_kl_gradient(logits: Tensor, token_ids: Tensor, *rest: Any) -> Tensor:
    *kl, statistics, dlogp, dkl = rest
    target, options = _kl_of(*kl)
    serve = dispatch.serving("forward_kl_gradient", logits, **target_facts(target))
    kept = (statistics,) if statistics.shape[0] else ()
    return serve(logits, token_ids, target, options, dlogp, dkl, *kept)


@_forward_kl_gradient.register_fake
def _(logits: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(logits)


def _kl_setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    tensors, ctx.options = inputs[:5], inputs[5:]
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(*tensors, output[2])
    ctx.set_materialize_grads(False)


@once_differentiable
def _kl_backward(ctx: Any, dlogp: Tensor | None, dkl: Tensor | None, _: Tensor | None) -> tuple:
    grad = None
    if dlogp is not None or dkl is not None:
        *tensors, statistics = ctx.saved_tensors
        grad = _forward_kl_gradient(*tensors, *ctx.options, statistics, dlogp, dkl)
    return grad, *[None] * 8


_forward_kl.register_autograd(_kl_backward, setup_context=_kl_setup)
