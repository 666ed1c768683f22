"""The row kernel: one program computes the loss and the gradient of a row.

The program reads the row from start to end for the statistics and keeps the row's end in registers. For the
gradient, it goes from end to start. The logits of support and token are read before anything is written.

Shapes: V vocabulary, K slots of a target (target.py). A block has R repeats, L lanes, C elements (rows.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from smopd.kernels.triton.rows import (
    NEG_INF,
    absorb,
    column,
    load_block,
    load_whole,
    merge_lanes,
    no_stats,
    softmax_gradient,
    sparse_gradient,
    store_block,
    widen,
    with_support,
    zero_row,
)
from smopd.kernels.triton.target import segments
from smopd.kernels.triton.terms import (
    all_zero,
    load_weights,
    loss_slopes,
    store_terms,
    store_zeros,
    support_terms,
    token_terms,
)


@triton.jit(do_not_specialize=["n_rows", "there"])
def row_kernel(
    logits_ptr, grad_ptr, token_ids_ptr,
    ids_ptr, logps_ptr, id_logps_ptr, masses_ptr, holes_ptr, skipped_ptr,
    adv_ptr, old_logp_ptr, pg_weight_ptr, kl_weight_ptr, ent_weight_ptr, reverse_adv_ptr, reverse_weight_ptr,
    terms_ptr, clipped_ptr,
    there, n_rows, stride_logits_n, stride_grad_n,
    scale, kl_scale, inv_temperature, inv_kl_temperature,
    clip_low, clip_high, dual_clip, opd_coef, entropy_coef,
    V: tl.constexpr, K: tl.constexpr,
    R: tl.constexpr, L: tl.constexpr, C: tl.constexpr, LAST: tl.constexpr, AHEAD: tl.constexpr,
    UNROLL: tl.constexpr, TWO: tl.constexpr, CURVED: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Compute a row. The pointer of an absent input is None. For absent columns, see `there` in terms.py.

    Row strides are in units of C elements. LAST: number of blocks held for the gradient. AHEAD: number of
    prefetched blocks, 1 or 2 (2 needs LAST > 2). The target pointers are the fields of RowTargets. holes_ptr
    turns the tail bucket on. TWO: the forward KL has its own temperature. CURVED: the entropy has a gradient.
    """
    tl.static_assert(AHEAD == 1 or LAST > 2)
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
    # Issue all independent loads first: the first blocks, the ids, the weights.
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
        # Elements per slot: at least a whole segment, and in total at least one per lane.
        EACH: tl.constexpr = R * C if K * R * C > L else L // K
        offs_E = row * K + tl.arange(0, K * EACH) // EACH
        ids_E, holes_E = tl.load(ids_ptr + offs_E), tl.load(holes_ptr + offs_E)
    weights = load_weights(pg_weight_ptr, kl_weight_ptr, ent_weight_ptr, reverse_weight_ptr, row, there)
    if all_zero(weights):
        store_zeros(terms_ptr, clipped_ptr, row, n_rows)
        if GRADIENT:
            zero_row(grad_row_ptr, V, BLOCK)
        return

    token_inside = (token_id >= 0) & (token_id < V)
    token = token_id.to(tl.int32)
    token_x = tl.load(row_ptr + token, mask=token_inside, other=float("nan")).to(tl.float32)
    if TARGET:
        first_K = id_logps_K > NEG_INF  # one slot per id
        x_K = tl.load(row_ptr + ids_K, mask=logps_K > NEG_INF, other=NEG_INF).to(tl.float32)
    else:
        ids_K, logps_K, id_logps_K, first_K, x_K = None, None, None, None, None
    stats = no_stats(L)
    if HOLES:
        around_E = segments(row_ptr, ids_E, holes_E, V, R, L, C, EACH)
        # A few elements can wait in registers until the loop ends; many would take registers from the loop.
        FEW: tl.constexpr = K * EACH <= 2 * L
        if not FEW:
            stats = absorb(around_E, skipped_L, stats, scale, kl_scale, K * EACH // L, L, 1, False, TWO)
    for block in tl.range(0, STREAMED, loop_unroll_factor=UNROLL):
        x = near
        if AHEAD == 2:
            near = far
            far = load_whole(row_ptr, block + 2, BLOCK, AGAIN, PACKED)
        else:
            near = load_whole(row_ptr, block + 1, BLOCK, AGAIN, PACKED)
        keep_L = ((skipped_L >> block) & 1) == 0
        stats = absorb(widen(x, DTYPE, False, NATIVE), keep_L, stats, scale, kl_scale, R, L, C, HOLES, TWO)
    if HOLES and FEW:
        stats = absorb(around_E, skipped_L, stats, scale, kl_scale, K * EACH // L, L, 1, False, TWO)
    # Load these values only now, because registers are scarce in the loop.
    teacher_mass = tl.load(masses_ptr + row) if TARGET else 0.0
    tail_q = tl.load(masses_ptr + n_rows + row) if HOLES else 0.0
    adv, old_logp = tl.load(adv_ptr + row), tl.load(old_logp_ptr + row)
    reverse_adv = column(reverse_adv_ptr, row)
    # Load the weights again instead of holding them in registers.
    weights = load_weights(pg_weight_ptr, kl_weight_ptr, ent_weight_ptr, reverse_weight_ptr, row, there)
    held = ()
    for i in tl.static_range(LAST):
        if i == 0:
            x = near
        elif i < AHEAD and STREAMED > 0:
            x = far
        else:
            x = load_block(row_ptr, STREAMED + i, V, BLOCK, i < LAST - 1, False)
        keep_L = ((skipped_L >> (STREAMED + i)) & 1) == 0
        stats = absorb(widen(x, DTYPE, False, NATIVE), keep_L, stats, scale, kl_scale, R, L, C, HOLES, TWO)
        if GRADIENT:
            held = held + (x,)  # noqa: RUF005  (Triton has no star expressions)

    # `off` are the statistics of the row. With a tail bucket, they leave out the support.
    off = merge_lanes(stats, TWO)
    whole = off
    if HOLES:
        whole = with_support(off, tl.where(first_K, x_K, NEG_INF), scale, kl_scale, TWO)
    values = token_terms(
        token_x, whole, scale, adv, old_logp, reverse_adv, clip_low, clip_high, dual_clip, there, REVERSE
    )
    kl, student_mass = support_terms(
        x_K, logps_K, first_K, off, whole, teacher_mass, tail_q, kl_scale, TARGET, HOLES
    )
    store_terms(terms_ptr, clipped_ptr, row, n_rows, kl, (teacher_mass, student_mass), values)

    if GRADIENT:
        dlogp, dkl, bend, idle = loss_slopes(weights, values, opd_coef, entropy_coef, TARGET, REVERSE, CURVED)
        if idle:
            zero_row(grad_row_ptr, V, BLOCK)
            return
        coefficients, token_grad, token_apart, grad_K = sparse_gradient(
            token, token_inside, token_x, x_K, ids_K, id_logps_K, off, whole, values[1], teacher_mass, tail_q,
            dlogp, dkl, bend, scale, kl_scale, inv_temperature, inv_kl_temperature, HOLES, CURVED, TWO,
        )  # fmt: skip

        tl.debug_barrier()  # all entries above must be read before any is written
        LEFT: tl.constexpr = min(AHEAD, STREAMED)  # blocks left after the loop
        if LEFT > 0:
            near = load_whole(row_ptr, STREAMED - 1, BLOCK, False, PACKED)
        if LEFT > 1:
            far = load_whole(row_ptr, STREAMED - 2, BLOCK, False, PACKED)
        for i in tl.static_range(LAST):
            x = widen(held[i], DTYPE, True, NATIVE)
            gradient = softmax_gradient(x, coefficients, scale, kl_scale, CURVED, TWO)
            store_block(grad_row_ptr, STREAMED + i, gradient, V, BLOCK, i < LAST - 1)
        for block in tl.range(STREAMED - 1, LEFT - 1, -1, loop_unroll_factor=AHEAD + 1):
            x = widen(near, DTYPE, False, NATIVE)
            if AHEAD == 2:
                near = far
                far = load_whole(row_ptr, block - 2, BLOCK, False, PACKED)
            else:
                near = load_whole(row_ptr, block - 1, BLOCK, False, PACKED)
            gradient = softmax_gradient(x, coefficients, scale, kl_scale, CURVED, TWO)
            store_block(grad_row_ptr, block, gradient, V, BLOCK, True)
        for i in tl.static_range(LEFT):
            x = widen(near if i == 0 else far, DTYPE, False, NATIVE)
            gradient = softmax_gradient(x, coefficients, scale, kl_scale, CURVED, TWO)
            store_block(grad_row_ptr, LEFT - 1 - i, gradient, V, BLOCK, True)

        tl.debug_barrier()
        out: tl.constexpr = grad_ptr.dtype.element_ty
        if TARGET:
            tl.store(grad_row_ptr + ids_K, grad_K.to(out), mask=first_K)
        tl.store(grad_row_ptr + token, token_grad.to(out), mask=token_apart)
