"""The forward KL's gradient, from the statistics of its forward: logits are read once and written once.

With the statistics a row's gradient is known but for its logits, so three launches have no row to wait for:

    coefficients  a warp a row: what an entry's gradient is made of, and the support's and token's entries
    tiles         many small programs, each of some elements of one row: a stream like a copy
    scatter       the entries of the support and the token over what the tiles wrote there

The gradient has memory of its own. A launch writes no element twice: results are repeatable.

Shapes: N tokens, V vocabulary, K slots of a row's target, E = K + 1 entries (C as in triton/rows.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from smopd.kernels.triton.rows import (
    NEG_INF,
    column,
    load_block,
    sparse_gradient,
    widen,
    write_block,
)


@triton.jit(do_not_specialize=["n_rows"])
def coefficients_kernel(
    logits_ptr, token_ids_ptr, ids_ptr, id_logps_ptr, masses_ptr, statistics_ptr, dlogp_ptr, dkl_ptr,
    coefficients_ptr, places_ptr, values_ptr,
    n_rows, stride_logits_n, scale, inv_temperature,
    V: tl.constexpr, K: tl.constexpr, C: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """A row. coefficients: (N, 2), softmax_gradient's h and level. places: (N, E), -1 without an entry.

    statistics: (4, N), the pairs (h, s) of the whole row and of what is off the support (rows.py).
    id_logps_ptr: one log-probability for each distinct id. Rows' strides are in units of C elements.
    """
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_logits_n * C
    token_id = tl.load(token_ids_ptr + row)
    slot_K = tl.arange(0, K)
    ids_K = tl.load(ids_ptr + row * K + slot_K)
    id_logps_K = tl.load(id_logps_ptr + row * K + slot_K)
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
    tl.store(coefficients_ptr + 2 * row, coefficients[0])
    tl.store(coefficients_ptr + 2 * row + 1, coefficients[1])
    places_ptr += row * (K + 1)
    values_ptr += row * (K + 1)
    tl.store(places_ptr + slot_K, tl.where(id_logps_K > NEG_INF, ids_K, -1))
    tl.store(values_ptr + slot_K, grad_K.to(values_ptr.dtype.element_ty))
    tl.store(places_ptr + K, tl.where(token_apart, token, -1))
    tl.store(values_ptr + K, token_grad.to(values_ptr.dtype.element_ty))


@triton.jit
def _write_tile(
    row_ptr, grad_row_ptr, tile, h, level, scale,
    V: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    x = widen(load_block(row_ptr, tile, V, BLOCK, WHOLE, False), row_ptr.dtype.element_ty, False, NATIVE)
    coefficients = (h, level, 0.0, 0.0, 0.0)
    write_block(grad_row_ptr, tile, x, coefficients, scale, scale, V, BLOCK, WHOLE, False, False)


@triton.jit
def tiles_kernel(
    logits_ptr, grad_ptr, coefficients_ptr, stride_logits_n, stride_grad_n, scale,
    V: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """BLOCK elements of a row, fewer at its end."""
    TILES: tl.constexpr = (V + BLOCK - 1) // BLOCK
    number = tl.program_id(0)
    row, tile = (number // TILES).to(tl.int64), number % TILES
    row_ptr = logits_ptr + row * stride_logits_n * C
    grad_row_ptr = grad_ptr + row * stride_grad_n * C
    h, level = tl.load(coefficients_ptr + 2 * row), tl.load(coefficients_ptr + 2 * row + 1)
    if tile < V // BLOCK:
        _write_tile(row_ptr, grad_row_ptr, tile, h, level, scale, V, BLOCK, True, NATIVE)
    else:
        _write_tile(row_ptr, grad_row_ptr, tile, h, level, scale, V, BLOCK, False, NATIVE)


@triton.jit(do_not_specialize=["n_entries"])
def scatter_kernel(
    grad_ptr, places_ptr, values_ptr, n_entries, stride_grad_n,
    E: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK entries, each of its row; there are no two of one place."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(places_ptr + offs, mask=offs < n_entries, other=-1)
    value = tl.load(values_ptr + offs, mask=offs < n_entries)
    tl.store(grad_ptr + (offs // E) * stride_grad_n * C + place, value, mask=place >= 0)
