"""The teachers' sparse mixture, and their sparse product over a reference.

Shapes: N packed response tokens, M teachers, S support entries (kappa).
"""

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
    """The kappa largest of all teachers' candidates, each shifted by log alpha (Eq. 6).

    With merge=True equal ids are joined by logsumexp first: the exact mixture (Eq. 5) of what the teachers
    sent. With merge=False repeats stay, as the paper has it. Never renormalised. Ties go to the lower id when
    merged, else to the lower teacher and then to its own order. Not differentiable.

    Args:
        ids_NMS: (N, M, S) int32 or int64; any value in a slot whose log-probability is -inf.
        logps_NMS: (N, M, S), nats; -inf marks an empty slot.
        log_alpha: (M,), (N, M) or what broadcasts to it, nats; -inf switches a teacher off.
        kappa: entries of the result, at least 0; above the number of candidates the rest is empty.
    Returns:
        Mixture: ids (N, kappa) int32, logps (N, kappa) by descending value, mass (N,). Empty slots: 0, -inf.
    Raises:
        TypeError, ValueError: an argument is not as above.
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
def _(ids: Tensor, logps: Tensor, log_alpha: Tensor, kappa: int, merge: bool) -> tuple[Tensor, ...]:
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
    """What the teachers changed of a reference, all changes together: for M models of which one is that.

    With each model's log-probabilities of the ids that every one of them gave, it equals

        change_NmS = weights_Nm1 * (logps_NmS - ref_N1S).clamp(-clip, clip)  # m: the others, in order
        logq_NS = (ref_NS + change_NmS.sum(1)).log_softmax(-1)               # over those ids alone
        logps_NS, at_NS = logq_NS.topk(kappa)                                # but with ties to the lower id

    With keep_raised, an id of which a teacher's change is above it keeps no negative change of the others:
    none of them undoes what one has raised. For KL-regularised RL from the reference, with weights 1, it is
    the optimum of the summed rewards (MOD, arXiv 2406.18853). Not differentiable.

    A weight of 0 leaves a teacher's change out; its ids are wanted all the same. An id that one model gave
    several times counts there with the logsumexp of them. A NaN under an id that every model gave makes the
    row NaN, its ids ascending, and its mass; under any other id it is not read.

    Args:
        ids_NMS: (N, M, S) int32 or int64, M >= 1; any value in a slot whose log-probability is -inf.
        logps_NMS: (N, M, S), nats; -inf marks an empty slot: the model did not give that id.
        weights: (M - 1,), (N, M - 1) or what broadcasts to it, finite: of each model but the reference.
        kappa: entries of the result, at least 0; beyond the support the rest is empty.
        reference: which of the M models is the reference, -M to M - 1.
        clip: most nats that a teacher's change counts, above 0; None: all.
        keep_raised: nats, at least 0, of a weighted change; None: changes always add up.
    Returns:
        Mixture: ids (N, kappa) int32, logps (N, kappa) by descending value, mass (N,) of what is kept, at
            most 1; 0 where no id is everyone's. Empty slots: 0, -inf.
    Raises:
        TypeError, ValueError: an argument is not as above.
    """
    op = "teacher_product"
    checks.check_product(op, ids_NMS, logps_NMS, weights, reference, clip, keep_raised)
    checks.check_kappa(op, kappa)
    limits = (math.inf if limit is None else float(limit) for limit in (clip, keep_raised))
    own = reference % ids_NMS.shape[1]
    return Mixture(*_teacher_product(ids_NMS, logps_NMS.detach(), weights.detach(), kappa, own, *limits))


@operator(
    "teacher_product",
    "(Tensor ids, Tensor logps, Tensor weights, SymInt kappa, SymInt reference, float clip,"
    " float keep_raised) -> (Tensor ids, Tensor logps, Tensor mass)",
)
def _teacher_product(
    ids: Tensor, logps: Tensor, weights: Tensor, kappa: int, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    serve = dispatch.serving("teacher_product", logps, n_support=ids.shape[2])
    product = serve(ids, logps, weights, kappa, ProductOptions(*options))
    return product.ids_NS, product.logps_NS, product.mass_N


@_teacher_product.register_fake
def _(ids: Tensor, logps: Tensor, weights: Tensor, kappa: int, *options: float) -> tuple[Tensor, ...]:
    n_rows = ids.shape[0]
    out_ids = empty_column(ids, n_rows, kappa, dtype=torch.int32)
    return out_ids, empty_column(logps, n_rows, kappa), empty_column(logps, n_rows)
