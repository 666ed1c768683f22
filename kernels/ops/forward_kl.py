"""The teachers' sparse mixture, and the student's forward KL to it.

Shapes: N packed response tokens, V vocabulary, M teachers, S support entries (kappa).
"""

from __future__ import annotations

from torch import Tensor

from smopd.kernels import checks
from smopd.kernels.ops import operators
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
    return Mixture(*operators.teacher_mixture(ids_NMS, logps_NMS.detach(), log_alpha.detach(), kappa, merge))


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
    return operators.forward_kl(logits_NV, token_ids_N, *union, tail, float(temperature))


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
    return operators.forward_kl(logits_NV, token_ids_N, *union, tail, float(temperature))
