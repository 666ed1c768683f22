"""The forward KL's gradient, from the statistics of its forward: a row is read once and written once.

Nothing has to be known of a row before its first block is written, so none is held and none is read again: a
stream, with several programs on a processor whose waits cover each other. The gradient has memory of its own.

Shapes: N tokens, V vocabulary, K slots of a row's target (R, L and C as in triton/rows.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from smopd.kernels.triton.rows import (
    NEG_INF,
    column,
    load_block,
    load_whole,
    sparse_gradient,
    widen,
    write_block,
)


@triton.jit(do_not_specialize=["n_rows"])
def kl_gradient_kernel(
    logits_ptr, grad_ptr, token_ids_ptr,
    ids_ptr, id_logps_ptr, masses_ptr, statistics_ptr, dlogp_ptr, dkl_ptr,
    n_rows, stride_logits_n, stride_grad_n, scale, inv_temperature,
    V: tl.constexpr, K: tl.constexpr, R: tl.constexpr, L: tl.constexpr, C: tl.constexpr,
    TAIL: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """A row. statistics: (4, N), the pairs (h, s) of the whole row and of what is off the support (rows.py).

    id_logps_ptr: one log-probability for each distinct id. Rows' strides are in units of C elements.
    """
    BLOCK: tl.constexpr = R * L * C
    BLOCKS: tl.constexpr = (V + BLOCK - 1) // BLOCK
    DTYPE: tl.constexpr = logits_ptr.dtype.element_ty
    PACKED: tl.constexpr = BLOCKS > 1 and C > 1 and DTYPE.primitive_bitwidth == 16
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_logits_n * C
    grad_row_ptr = grad_ptr + row * stride_grad_n * C
    if BLOCKS > 1:
        near = load_whole(row_ptr, 0, BLOCK, False, PACKED)
    last = load_block(row_ptr, BLOCKS - 1, V, BLOCK, False, False)
    token_id = tl.load(token_ids_ptr + row)
    offs_K = row * K + tl.arange(0, K)
    ids_K = tl.load(ids_ptr + offs_K)
    id_logps_K = tl.load(id_logps_ptr + offs_K)
    teacher_mass = tl.load(masses_ptr + row)
    tail_q = tl.load(masses_ptr + n_rows + row) if TAIL else 0.0
    h, s = tl.load(statistics_ptr + row), tl.load(statistics_ptr + n_rows + row)
    off_h, off_s = tl.load(statistics_ptr + 2 * n_rows + row), tl.load(statistics_ptr + 3 * n_rows + row)
    dlogp, dkl = column(dlogp_ptr, row), column(dkl_ptr, row)
    token_inside = (token_id >= 0) & (token_id < V)
    token = token_id.to(tl.int32)
    token_x = tl.load(row_ptr + token, mask=token_inside, other=float("nan")).to(tl.float32)
    x_K = tl.load(row_ptr + ids_K, mask=id_logps_K > NEG_INF, other=NEG_INF).to(tl.float32)

    coefficients, token_grad, token_apart, grad_K = sparse_gradient(
        token, token_inside, token_x, x_K, ids_K, id_logps_K, (off_h, off_s, 0.0, off_h, off_s),
        (h, s, 0.0, h, s), 0.0, teacher_mass, tail_q,
        dlogp, dkl, 0.0, scale, scale, inv_temperature, inv_temperature, TAIL, False, False,
    )  # fmt: skip
    x = widen(last, DTYPE, False, NATIVE)
    write_block(grad_row_ptr, BLOCKS - 1, x, coefficients, scale, scale, V, BLOCK, False, False, False)
    if BLOCKS > 1:
        for block in tl.range(0, BLOCKS - 2, loop_unroll_factor=2):
            x = widen(near, DTYPE, False, NATIVE)
            near = load_whole(row_ptr, block + 1, BLOCK, False, PACKED)
            write_block(grad_row_ptr, block, x, coefficients, scale, scale, V, BLOCK, True, False, False)
        x = widen(near, DTYPE, False, NATIVE)
        write_block(grad_row_ptr, BLOCKS - 2, x, coefficients, scale, scale, V, BLOCK, True, False, False)

    tl.debug_barrier()  # the entries below are the last to be written
    tl.store(grad_row_ptr + ids_K, grad_K.to(grad_ptr.dtype.element_ty), mask=id_logps_K > NEG_INF)
    tl.store(grad_row_ptr + token, token_grad.to(grad_ptr.dtype.element_ty), mask=token_apart)
