"""The sparse mixture of several teachers."""

from __future__ import annotations

import torch
from torch import Tensor

from smopd.kernels import checks, dispatch
from smopd.kernels.ops.library import empty_column, operator
from smopd.kernels.types import Mixture


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
def _fake(ids: Tensor, logps: Tensor, log_alpha: Tensor, kappa: int, merge: bool) -> tuple[Tensor, ...]:
    n_rows = ids.shape[0]
    out_ids = empty_column(ids, n_rows, kappa, dtype=torch.int32)
    return out_ids, empty_column(logps, n_rows, kappa), empty_column(logps, n_rows)
