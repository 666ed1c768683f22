"""The row kernel: loss or forward KL, one program a row, the loss's gradient written in the same launch.

A program streams its row once for the statistics, keeping the row's end in registers as it came, then goes
back over it in reverse for the gradient: the end from registers, the rest out of the L2 cache. The entries of
the target's support and the token's are read before anything is written, and written last, from fp32. With
the tail bucket a lane leaves out of its sums those segments that hold support; they are gathered and summed
apart, so that the student's mass off the support is a sum of its own, not a difference.

No atomics and nothing between rows: results are repeatable, and a row does not depend on its batch.

Shapes: N tokens, V vocabulary, M teachers, S support entries (kappa), K slots of a row's target, W of them,
    R repeats, L lanes and C consecutive elements of a block (triton/rows.py, triton/target.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from smopd.kernels.triton.rows import (
    LN2,
    LOG2E,
    NEG_INF,
    absorb,
    column,
    few_stats,
    finite,
    join_stats,
    load_block,
    load_whole,
    merge_lanes,
    no_stats,
    policy_terms,
    sparse_gradient,
    weighted,
    widen,
    write_block,
    zero_row,
)
from smopd.kernels.triton.target import segments

COLUMNS = ("adv", "old_logp", "pg_weight", "kl_weight", "ent_weight", "reverse_adv", "reverse_weight")
# Bits of `there`, by a column's place in COLUMNS, and one that says that the reverse term has PPO's form.
_OLD_LOGP = tl.constexpr(1 << COLUMNS.index("old_logp"))
_KL_WEIGHT = tl.constexpr(1 << COLUMNS.index("kl_weight"))
_ENT_WEIGHT = tl.constexpr(1 << COLUMNS.index("ent_weight"))
_REVERSE_WEIGHT = tl.constexpr(1 << COLUMNS.index("reverse_weight"))
PPO = 1 << len(COLUMNS)
_PPO = tl.constexpr(PPO)


@triton.jit
def _weights(pg_weight_ptr, kl_weight_ptr, ent_weight_ptr, reverse_weight_ptr, row, there):
    pg_weight = tl.load(pg_weight_ptr + row)
    kl_weight = tl.load(kl_weight_ptr + row, mask=(there & _KL_WEIGHT) != 0, other=0.0)
    ent_weight = tl.load(ent_weight_ptr + row, mask=(there & _ENT_WEIGHT) != 0, other=0.0)
    reverse_weight = tl.load(reverse_weight_ptr + row, mask=(there & _REVERSE_WEIGHT) != 0, other=0.0)
    return pg_weight, kl_weight, ent_weight, reverse_weight


@triton.jit(do_not_specialize=["n_rows", "there"])
def row_kernel(
    logits_ptr, grad_ptr, token_ids_ptr,
    ids_ptr, logps_ptr, id_logps_ptr, masses_ptr, holes_ptr, skipped_ptr,
    adv_ptr, old_logp_ptr, pg_weight_ptr, kl_weight_ptr, ent_weight_ptr, reverse_adv_ptr, reverse_weight_ptr,
    terms_ptr, clipped_ptr, kl_ptr, statistics_ptr,
    there, n_rows, stride_logits_n, stride_grad_n,
    scale, kl_scale, inv_temperature, inv_kl_temperature,
    clip_low, clip_high, dual_clip, opd_coef, entropy_coef,
    V: tl.constexpr, K: tl.constexpr,
    R: tl.constexpr, L: tl.constexpr, C: tl.constexpr, LAST: tl.constexpr, AHEAD: tl.constexpr,
    UNROLL: tl.constexpr, TWO: tl.constexpr, CURVED: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """A row of the loss (there is adv), or of the forward KL, whose gradient is a kernel of its own
    (triton/kl_gradient.py). A pointer may be None, and then costs nothing. But the loss's COLUMNS all point
    somewhere, but for reverse_adv, and `there` says which of them are there.

    Rows' strides are in units of C elements. LAST: blocks at the row's end, held if there is a gradient.
    AHEAD: blocks on the way while one is worked on; 1, or 2 where LAST is 3 or more.
    The target's pointers are RowTargets' (triton/target.py); with holes_ptr there is one more bucket, for all
    that is off the support. TWO: the forward KL has a temperature of its own. CURVED: the entropy has a
    gradient.
    """
    tl.static_assert(AHEAD == 1 or LAST > 2)
    LOSS: tl.constexpr = adv_ptr is not None
    GRADIENT: tl.constexpr = grad_ptr is not None
    TARGET: tl.constexpr = ids_ptr is not None
    REVERSE: tl.constexpr = reverse_adv_ptr is not None
    HOLES: tl.constexpr = holes_ptr is not None
    BLOCK: tl.constexpr = R * L * C
    BLOCKS: tl.constexpr = (V + BLOCK - 1) // BLOCK
    STREAMED: tl.constexpr = BLOCKS - LAST
    AGAIN: tl.constexpr = GRADIENT and STREAMED > 0
    DTYPE: tl.constexpr = logits_ptr.dtype.element_ty
    PACKED: tl.constexpr = STREAMED > 0 and C > 1 and DTYPE.primitive_bitwidth == 16

    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_logits_n * C
    grad_row_ptr = row_ptr
    if GRADIENT:
        grad_row_ptr = grad_ptr + row * stride_grad_n * C
    # All that waits for nothing, in one trip to memory: what streams first, the ids, the weights.
    if STREAMED > 0:
        near = load_whole(row_ptr, 0, BLOCK, AGAIN, PACKED)
        if AHEAD == 2:
            far = load_whole(row_ptr, 1, BLOCK, AGAIN, PACKED)
    else:
        near = load_block(row_ptr, 0, V, BLOCK, BLOCKS > 1, False)
    token_id = tl.load(token_ids_ptr + row)
    skipped_L = tl.zeros((L,), tl.int32 if BLOCKS <= 32 else tl.int64)  # a bit for each block
    if TARGET:
        offs_K = row * K + tl.arange(0, K)
        ids_K = tl.load(ids_ptr + offs_K)
        logps_K = tl.load(logps_ptr + offs_K)
        id_logps_K = logps_K if id_logps_ptr is None else tl.load(id_logps_ptr + offs_K)
    if HOLES:
        skipped_L = tl.load(skipped_ptr + row * L + tl.arange(0, L))
        # A segment's elements for each slot, together at least one for each lane.
        EACH: tl.constexpr = R * C if K * R * C > L else L // K
        offs_E = row * K + tl.arange(0, K * EACH) // EACH
        ids_E, holes_E = tl.load(ids_ptr + offs_E), tl.load(holes_ptr + offs_E)
    if LOSS:
        pg_weight, kl_weight, ent_weight, reverse_weight = _weights(
            pg_weight_ptr, kl_weight_ptr, ent_weight_ptr, reverse_weight_ptr, row, there
        )
        if (pg_weight == 0) & (kl_weight == 0) & (ent_weight == 0) & (reverse_weight == 0):
            for number in tl.static_range(7):
                tl.store(terms_ptr + number * n_rows + row, 0.0)
            tl.store(clipped_ptr + row, 0)
            if GRADIENT:
                zero_row(grad_row_ptr, V, BLOCK)
            return

    token_inside = (token_id >= 0) & (token_id < V)
    token = token_id.to(tl.int32)
    token_x = tl.load(row_ptr + token, mask=token_inside, other=float("nan")).to(tl.float32)
    if TARGET:
        first_K = id_logps_K > NEG_INF  # one slot for each id
        x_K = tl.load(row_ptr + ids_K, mask=logps_K > NEG_INF, other=NEG_INF).to(tl.float32)
    else:
        ids_K, id_logps_K, x_K = None, None, None
    stats = no_stats(L)
    if HOLES:
        around_E = segments(row_ptr, ids_E, holes_E, V, R, L, C, EACH)
        # Few of them wait in registers for the loop's end, many would cost the loop its own.
        FEW: tl.constexpr = K * EACH <= 2 * L
        if not FEW:
            stats = absorb(around_E, skipped_L, stats, scale, kl_scale, K * EACH // L, L, 1, False, LOSS, TWO)
    for block in tl.range(0, STREAMED, loop_unroll_factor=UNROLL):
        x = near
        if AHEAD == 2:
            near = far
            far = load_whole(row_ptr, block + 2, BLOCK, AGAIN, PACKED)
        else:
            near = load_whole(row_ptr, block + 1, BLOCK, AGAIN, PACKED)
        keep_L = ((skipped_L >> block) & 1) == 0
        stats = absorb(
            widen(x, DTYPE, False, NATIVE), keep_L, stats, scale, kl_scale, R, L, C, HOLES, LOSS, TWO
        )
    if HOLES and FEW:
        stats = absorb(around_E, skipped_L, stats, scale, kl_scale, K * EACH // L, L, 1, False, LOSS, TWO)
    # What the row's end needs, asked for while the last blocks come; before, registers are scarce.
    teacher_mass = tl.load(masses_ptr + row) if TARGET else 0.0
    tail_q = tl.load(masses_ptr + n_rows + row) if HOLES else 0.0
    if LOSS:
        adv, old_logp = tl.load(adv_ptr + row), tl.load(old_logp_ptr + row)
        reverse_adv = column(reverse_adv_ptr, row)
        # A second time: an address is the row's, and costs the loop nothing.
        pg_weight, kl_weight, ent_weight, reverse_weight = _weights(
            pg_weight_ptr, kl_weight_ptr, ent_weight_ptr, reverse_weight_ptr, row, there
        )
    held = ()
    for i in tl.static_range(LAST):
        if i == 0:
            x = near
        elif i < AHEAD and STREAMED > 0:
            x = far
        else:
            x = load_block(row_ptr, STREAMED + i, V, BLOCK, i < LAST - 1, False)
        keep_L = ((skipped_L >> (STREAMED + i)) & 1) == 0
        stats = absorb(
            widen(x, DTYPE, False, NATIVE), keep_L, stats, scale, kl_scale, R, L, C, HOLES, LOSS, TWO
        )
        if GRADIENT:
            held = held + (x,)  # noqa: RUF005  (Triton's language has no star)

    # off: the row's statistics without its support if there is a tail bucket, else the same as the whole's.
    off = merge_lanes(stats, LOSS, TWO)
    whole = off
    if HOLES:
        whole = join_stats(off, few_stats(tl.where(first_K, x_K, NEG_INF), scale, kl_scale, TWO), TWO)
    h, s, w, kl_h, kl_s = whole
    # In fp64: the log ratio is a difference of what has been rounded at 10 or 20.
    exact_logp = (token_x.to(tl.float64) * scale - finite(h) - tl.log2(s)) * LN2
    logp = exact_logp.to(tl.float32)

    kl = 0.0
    student_mass = 0.0
    if TARGET:
        q_K = tl.exp2(logps_K * LOG2E)
        student_K = (tl.fma(x_K, kl_scale, -finite(kl_h)) - tl.log2(kl_s)) * LN2
        kl = tl.sum(tl.where(q_K != 0, q_K * (logps_K - student_K), 0.0), 0)  # != 0: NaN is
        student_mass = tl.sum(tl.where(first_K, tl.exp2(student_K * LOG2E), 0.0), 0)
        student_mass = tl.where(teacher_mass != teacher_mass, teacher_mass, student_mass)
        if HOLES:
            tail_logp = (finite(off[3]) - finite(kl_h) + tl.log2(off[4]) - tl.log2(kl_s)) * LN2
            kl += tl.where(tail_q > 0, tail_q * (tl.log2(tail_q) * LN2 - tail_logp), 0.0)

    entropy = 0.0
    if LOSS:
        entropy = (tl.log2(s) - w / s) * LN2
        raw = tl.where((there & _OLD_LOGP) != 0, (exact_logp - old_logp).to(tl.float32), 0.0)
        surrogate, slope, reverse, reverse_slope, clipped = policy_terms(
            raw, adv, reverse_adv, clip_low, clip_high, dual_clip, (there & _PPO) != 0, REVERSE
        )
        tl.store(terms_ptr + row, logp)
        tl.store(terms_ptr + n_rows + row, entropy)
        tl.store(terms_ptr + 2 * n_rows + row, kl)
        tl.store(terms_ptr + 3 * n_rows + row, teacher_mass)
        tl.store(terms_ptr + 4 * n_rows + row, student_mass)
        tl.store(terms_ptr + 5 * n_rows + row, surrogate)
        tl.store(terms_ptr + 6 * n_rows + row, reverse)
        tl.store(clipped_ptr + row, clipped.to(tl.int8))
    else:
        tl.store(terms_ptr + row, logp)
        tl.store(kl_ptr + row, kl)
        tl.store(statistics_ptr + row, h)
        tl.store(statistics_ptr + n_rows + row, s)
        tl.store(statistics_ptr + 2 * n_rows + row, off[0])
        tl.store(statistics_ptr + 3 * n_rows + row, off[1])

    if GRADIENT:
        dkl = opd_coef * kl_weight if TARGET else 0.0
        reverse_coef = opd_coef * reverse_weight if REVERSE else 0.0
        bend = entropy_coef * ent_weight if CURVED else 0.0
        if (pg_weight == 0) & (dkl == 0) & (reverse_coef == 0) & (bend == 0):
            zero_row(grad_row_ptr, V, BLOCK)
            return
        dlogp = weighted(pg_weight, slope) + weighted(reverse_coef, reverse_slope)
        coefficients, token_grad, token_apart, grad_K = sparse_gradient(
            token, token_inside, token_x, x_K, ids_K, id_logps_K, off, whole, entropy, teacher_mass, tail_q,
            dlogp, dkl, bend, scale, kl_scale, inv_temperature, inv_kl_temperature, HOLES, CURVED, TWO,
        )  # fmt: skip

        tl.debug_barrier()  # the entries above are read before anything is overwritten
        LEFT: tl.constexpr = min(AHEAD, STREAMED)  # blocks behind the loop
        if LEFT > 0:
            near = load_whole(row_ptr, STREAMED - 1, BLOCK, False, PACKED)
        if LEFT > 1:
            far = load_whole(row_ptr, STREAMED - 2, BLOCK, False, PACKED)
        for i in tl.static_range(LAST):
            x = widen(held[i], DTYPE, True, NATIVE)
            write_block(
                grad_row_ptr, STREAMED + i, x, coefficients, scale, kl_scale,
                V, BLOCK, i < LAST - 1, CURVED, TWO,
            )  # fmt: skip
        for block in tl.range(STREAMED - 1, LEFT - 1, -1, loop_unroll_factor=AHEAD + 1):
            x = widen(near, DTYPE, False, NATIVE)
            if AHEAD == 2:
                near = far
                far = load_whole(row_ptr, block - 2, BLOCK, False, PACKED)
            else:
                near = load_whole(row_ptr, block - 1, BLOCK, False, PACKED)
            write_block(grad_row_ptr, block, x, coefficients, scale, kl_scale, V, BLOCK, True, CURVED, TWO)
        for i in tl.static_range(LEFT):
            x = widen(near if i == 0 else far, DTYPE, False, NATIVE)
            write_block(
                grad_row_ptr, LEFT - 1 - i, x, coefficients, scale, kl_scale, V, BLOCK, True, CURVED, TWO
            )

        tl.debug_barrier()
        out: tl.constexpr = grad_ptr.dtype.element_ty
        if TARGET:
            tl.store(grad_row_ptr + ids_K, grad_K.to(out), mask=first_K)
        tl.store(grad_row_ptr + token, token_grad.to(out), mask=token_apart)
