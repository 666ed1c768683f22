"""The teachers' sparse mixture.

Shapes: N packed response tokens, M teachers, S support entries (kappa).
"""

from __future__ import annotations

import torch
from torch import Tensor

from smopd.kernels import checks, dispatch
from smopd.kernels.ops.library import empty_column, operator
from smopd.kernels.types import Mixture


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
    if checks.debugging():
        checks.debug_target(op, "", ids_NMS, logps_NMS, None)
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
