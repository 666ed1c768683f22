"""Sparse targets from several teachers: their mixture, and their product over a reference."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from smopd.kernels import checks, dispatch
from smopd.kernels.ops.library import empty_column, operator
from smopd.kernels.types import Mixture, ProductOptions


def teacher_mixture(
    ids_NMS: Tensor, logps_NMS: Tensor, log_alpha: Tensor, kappa: int, *, merge: bool = False
) -> Mixture:
    """Keep the kappa largest log alpha + log p of all teachers' candidates (Eq. 6).

    merge=True first joins equal ids by logsumexp: the exact mixture (Eq. 5) of the candidates. merge=False
    keeps repeats, as the paper does. Never renormalised. Ties go to the lower id if merged, else to the lower
    teacher and then to its order. Not differentiable.

    Args:
        ids_NMS: (N, M, S) int32 or int64; any value in an empty slot.
        logps_NMS: (N, M, S), nats; -inf marks an empty slot.
        log_alpha: (M,), (N, M) or broadcastable, nats; -inf switches a teacher off.
        kappa: entries of the result, at least 0.
    Returns:
        Mixture: ids (N, kappa) int32, logps (N, kappa) descending, mass (N,). Empty slots hold 0, -inf.
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
def _fake(ids: Tensor, logps: Tensor, weights: Tensor, kappa: int, *options: Any) -> tuple[Tensor, ...]:
    n_rows = ids.shape[0]
    out_ids = empty_column(ids, n_rows, kappa, dtype=torch.int32)
    return out_ids, empty_column(logps, n_rows, kappa), empty_column(logps, n_rows)


def teacher_product(
    ids_NMS: Tensor,
    logps_NMS: Tensor,
    weights: Tensor,
    kappa: int,
    *,
    reference: int = -1,
    clip: float | None = None,
    keep_raised: float | None = None,
) -> Mixture:
    """Add the changes of all teachers to a reference model: the product of their distributions.

    The support are the ids that every one of the M models gave. On it, the result equals

        change_NmS = weights_Nm1 * (logps_NmS - ref_N1S).clamp(-clip, clip)  # m: the teachers, in order
        logq_NS = (ref_NS + change_NmS.sum(1)).log_softmax(-1)
        logps_NS, at_NS = logq_NS.topk(kappa)                                # ties go to the lower id

    With keep_raised, negative changes of an id are ignored if any teacher's change of it exceeds keep_raised.
    With weights 1 and without limits this is the optimum of KL-regularised RL on the sum of the teachers'
    rewards (MOD, arXiv 2406.18853). Not differentiable.

    A teacher of weight 0 still restricts the support. Repeats of an id in a model are joined by logsumexp.
    A NaN on the support makes the row and its mass NaN, with ids ascending; a NaN elsewhere is ignored.

    Args:
        ids_NMS: (N, M, S) int32 or int64, M >= 1; any value in an empty slot.
        logps_NMS: (N, M, S), nats; -inf marks an empty slot.
        weights: (M - 1,), (N, M - 1) or broadcastable, finite: of each model except the reference.
        kappa: entries of the result, at least 0.
        reference: index of the reference model, -M to M - 1.
        clip: limit of each change before its weight, nats, above 0; None: no limit.
        keep_raised: nats, at least 0, of a weighted change; None: changes always add up.
    Returns:
        Mixture: ids (N, kappa) int32, logps (N, kappa) descending, mass (N,) of the kept entries, at most 1.
            Empty slots hold 0, -inf.
    """
    op = "teacher_product"
    checks.check_product(op, ids_NMS, logps_NMS, weights, reference, clip, keep_raised)
    checks.check_kappa(op, kappa)
    limits = (math.inf if limit is None else float(limit) for limit in (clip, keep_raised))
    options = (kappa, reference % ids_NMS.shape[1], *limits)
    return Mixture(*_teacher_product(ids_NMS, logps_NMS.detach(), weights.detach(), *options))


@operator(
    "teacher_product",
    "(Tensor ids, Tensor logps, Tensor weights, SymInt kappa, SymInt reference, float clip,"
    " float keep_raised) -> (Tensor ids, Tensor logps, Tensor mass)",
)
def _teacher_product(
    ids: Tensor, logps: Tensor, weights: Tensor, kappa: int, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    serve = dispatch.serving("teacher_product", logps)
    product = serve(ids, logps, weights, kappa, ProductOptions(*options))
    return product.ids_NS, product.logps_NS, product.mass_N


_teacher_product.register_fake(_fake)
