"""The terms of a token's loss, computed from the statistics of its row (see reference/loss.py)."""

import triton
import triton.language as tl

from smopd.kernels import types
from smopd.kernels.triton.rows import LN2, LOG2E, finite, weighted

COLUMNS = ("adv", "old_logp", "pg_weight", "kl_weight", "ent_weight", "reverse_adv", "reverse_weight")
# Bits of `there`: one per column of COLUMNS that is given, and one for PPO's form of the reverse term.
_OLD_LOGP = tl.constexpr(1 << COLUMNS.index("old_logp"))
_KL_WEIGHT = tl.constexpr(1 << COLUMNS.index("kl_weight"))
_ENT_WEIGHT = tl.constexpr(1 << COLUMNS.index("ent_weight"))
_REVERSE_WEIGHT = tl.constexpr(1 << COLUMNS.index("reverse_weight"))
PPO = 1 << len(COLUMNS)
_PPO = tl.constexpr(PPO)

_LOG_RATIO_BOUND = tl.constexpr(types.LOG_RATIO_BOUND)
_CLIP_LOW = tl.constexpr(types.CLIP_LOW)
_CLIP_HIGH = tl.constexpr(types.CLIP_HIGH)
_CLIP_DUAL = tl.constexpr(types.CLIP_DUAL)
_CLIP_LOG_RATIO = tl.constexpr(types.CLIP_LOG_RATIO)
_CLIP_REVERSE_LOW = tl.constexpr(types.CLIP_REVERSE_LOW)
_CLIP_REVERSE_HIGH = tl.constexpr(types.CLIP_REVERSE_HIGH)


@triton.jit
def load_weights(pg_weight_ptr, kl_weight_ptr, ent_weight_ptr, reverse_weight_ptr, row, there):
    """Load the pg, KL, entropy and reverse weights of a token. A column that is not given counts as 0."""
    pg_weight = tl.load(pg_weight_ptr + row)
    kl_weight = tl.load(kl_weight_ptr + row, mask=(there & _KL_WEIGHT) != 0, other=0.0)
    ent_weight = tl.load(ent_weight_ptr + row, mask=(there & _ENT_WEIGHT) != 0, other=0.0)
    reverse_weight = tl.load(reverse_weight_ptr + row, mask=(there & _REVERSE_WEIGHT) != 0, other=0.0)
    return pg_weight, kl_weight, ent_weight, reverse_weight


@triton.jit
def all_zero(weights):
    return (weights[0] == 0) & (weights[1] == 0) & (weights[2] == 0) & (weights[3] == 0)


@triton.jit
def store_zeros(terms_ptr, clipped_ptr, row, n_rows):
    for number in tl.static_range(7):
        tl.store(terms_ptr + number * n_rows + row, 0.0)
    tl.store(clipped_ptr + row, 0)


@triton.jit
def store_terms(terms_ptr, clipped_ptr, row, n_rows, kl, masses, token):
    """Store a token's terms. masses: of teacher and student on the support. token: result of token_terms."""
    logp, entropy, surrogate, _, reverse, _, clipped = token
    tl.store(terms_ptr + row, logp)
    tl.store(terms_ptr + n_rows + row, entropy)
    tl.store(terms_ptr + 2 * n_rows + row, kl)
    tl.store(terms_ptr + 3 * n_rows + row, masses[0])
    tl.store(terms_ptr + 4 * n_rows + row, masses[1])
    tl.store(terms_ptr + 5 * n_rows + row, surrogate)
    tl.store(terms_ptr + 6 * n_rows + row, reverse)
    tl.store(clipped_ptr + row, clipped.to(tl.int8))


@triton.jit
def support_terms(
    x_K, logps_K, first_K, off, whole, teacher_mass, tail_q, kl_scale,
    TARGET: tl.constexpr, HOLES: tl.constexpr,
):  # fmt: skip
    """Return the forward KL and the student's mass on the support."""
    kl_h, kl_s = whole[3], whole[4]
    kl = 0.0
    student_mass = 0.0
    if TARGET:
        q_K = tl.exp2(logps_K * LOG2E)
        student_K = (tl.fma(x_K, kl_scale, -finite(kl_h)) - tl.log2(kl_s)) * LN2
        kl = tl.sum(tl.where(q_K != 0, q_K * (logps_K - student_K), 0.0), 0)  # NaN != 0
        student_mass = tl.sum(tl.where(first_K, tl.exp2(student_K * LOG2E), 0.0), 0)
        student_mass = tl.where(teacher_mass != teacher_mass, teacher_mass, student_mass)
    if HOLES:
        tail_logp = (finite(off[3]) - finite(kl_h) + tl.log2(off[4]) - tl.log2(kl_s)) * LN2
        kl += tl.where(tail_q > 0, tail_q * (tl.log2(tail_q) * LN2 - tail_logp), 0.0)
    return kl, student_mass


@triton.jit
def token_terms(
    token_x, whole, scale, adv, old_logp, reverse_adv, clip_low, clip_high, dual_clip, there,
    REVERSE: tl.constexpr,
):  # fmt: skip
    """Return logp, entropy, surrogate, its slope in logp, the reverse term, its slope, and the clip bits."""
    h, s, w = whole[0], whole[1], whole[2]
    # In fp64, because the log ratio is a small difference of numbers of about 10.
    logp = (token_x.to(tl.float64) * scale - finite(h) - tl.log2(s)) * LN2
    entropy = (tl.log2(s) - w / s) * LN2
    raw = tl.where((there & _OLD_LOGP) != 0, (logp - old_logp).to(tl.float32), 0.0)
    surrogate, slope, reverse, reverse_slope, clipped = _policy_terms(
        raw, adv, reverse_adv, clip_low, clip_high, dual_clip, (there & _PPO) != 0, REVERSE
    )
    return logp.to(tl.float32), entropy, surrogate, slope, reverse, reverse_slope, clipped


@triton.jit
def loss_slopes(
    weights, token, opd_coef, entropy_coef, TARGET: tl.constexpr, REVERSE: tl.constexpr, CURVED: tl.constexpr
):
    """Return the loss's derivatives in logp, KL and -entropy, and whether all their factors are 0."""
    dkl = opd_coef * weights[1] if TARGET else 0.0
    bend = entropy_coef * weights[2] if CURVED else 0.0
    reverse_coef = opd_coef * weights[3] if REVERSE else 0.0
    dlogp = weighted(weights[0], token[3]) + weighted(reverse_coef, token[5])
    return dlogp, dkl, bend, all_zero((weights[0], dkl, bend, reverse_coef))


@triton.jit
def _larger(a, b):
    """Return the maximum. NaN can only come from a factor of both arguments. The result is then NaN, too."""
    return tl.where(a >= b, a, b)


@triton.jit
def _policy_terms(raw, adv, reverse_adv, low, high, dual_clip, ppo, REVERSE: tl.constexpr):
    """Return surrogate, its slope in logp, reverse term, its slope, clip bits. If off, dual_clip is inf."""
    bound: tl.constexpr = _LOG_RATIO_BOUND
    saturated = tl.abs(raw) > bound
    ratio = tl.exp2(tl.where(raw > bound, bound, tl.where(raw < -bound, -bound, raw)) * LOG2E)
    below, above = ratio < low, ratio > high
    clipped_ratio = tl.where(below, low, tl.where(above, high, ratio))

    surrogate = _larger(-adv * ratio, -adv * clipped_ratio)
    is_low, is_high = below & (adv < 0), above & (adv > 0)
    is_dual = (adv < 0) & (surrogate > -dual_clip * adv)
    surrogate = tl.where(is_dual, -dual_clip * adv, surrogate)
    slope = tl.where(is_low | is_high | is_dual | saturated, 0.0, -adv * ratio)

    bits = tl.where(is_low, _CLIP_LOW, 0) + tl.where(is_high, _CLIP_HIGH, 0)
    bits += tl.where(is_dual, _CLIP_DUAL, 0) + tl.where(saturated, _CLIP_LOG_RATIO, 0)

    reverse = 0.0
    reverse_slope = 0.0
    if REVERSE:
        reverse = -reverse_adv * clipped_ratio
        reverse = tl.where(ppo, _larger(-reverse_adv * ratio, reverse), reverse)
        below = below & ((reverse_adv < 0) | ~ppo)
        above = above & ((reverse_adv > 0) | ~ppo)
        reverse_slope = tl.where(below | above | saturated, 0.0, -reverse_adv * ratio)
        bits += tl.where(below, _CLIP_REVERSE_LOW, 0) + tl.where(above, _CLIP_REVERSE_HIGH, 0)
    return surrogate, slope, reverse, reverse_slope, bits
