"""The two passes over a tile of logits (head/tiles.py), a program a row of it, and a target's repeats.

    scan      reads a tile once; each lane keeps statistics of its own elements (triton/rows.py), which are
              merged with the row's sums at the end. With the tail bucket the support's logits are set to -inf
              before and put back after, so what streams is the row without them.
    gradient  reads and writes a tile once, 2^(x scale - h) (level + curve u) for every logit, and then the
              entries of the support and the token, which come from the rows' sums and not from the tile.

Widths are run-time values: recompute's depend on the number of tokens, and nothing is compiled again for
another. The block that may be cut off goes first, so that the loops have whole blocks alone, the next one on
its way. No atomics: results are repeatable.

Shapes: P a piece of the vocabulary, K slots, C columns of sums; blocks of R L C elements (triton/rows.py).
"""

import triton
import triton.language as tl

from smopd.kernels.head.tiles import SUMS
from smopd.kernels.triton.rows import (
    FLOOR,
    LN2,
    LOG2E,
    NEG_INF,
    absorb,
    few_stats,
    finite,
    join_stats,
    merge_lanes,
    no_stats,
    softmax_gradient,
    widen,
)

_SUMS = tl.constexpr(SUMS)
_NOT_HERE = tl.constexpr(-1.0e30)  # in a sum of positive numbers: it counts at another slot


@triton.jit
def _load(row_ptr, block, width, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """A block of a tile's row, -inf behind its end unless WHOLE."""
    offs_p = block * BLOCK + tl.arange(0, BLOCK)
    if WHOLE:
        return tl.load(row_ptr + offs_p)
    else:
        return tl.load(row_ptr + offs_p, mask=offs_p < width, other=NEG_INF)


@triton.jit
def _exponent_of(x, scale):
    """x scale - h of the logit that h = x scale was rounded from, which may be 2^-24 of h."""
    h = x * scale
    return tl.where(tl.abs(h) < float("inf"), tl.fma(x, scale, -h), 0.0)


@triton.jit
def _add_to_sums(sums_ptr, stride_sums_c, x, s, w, scale, inv_temperature):
    """(h, s, w) with h from the largest logit x joined to peak, total, slope, as head.tiles.merge_."""
    lost = _exponent_of(x, scale)
    unit = tl.exp2(-lost).to(tl.float64)
    other_total = s.to(tl.float64) * unit
    other_slope = (w - lost * s).to(tl.float64) * unit * LN2
    other_peak = x.to(tl.float64) * inv_temperature
    peak, total = tl.load(sums_ptr), tl.load(sums_ptr + stride_sums_c)
    slope = tl.load(sums_ptr + 2 * stride_sums_c)
    top = tl.maximum(peak, other_peak)
    shift = tl.where(peak == NEG_INF, 0.0, peak - top)
    other_shift = tl.where(other_peak == NEG_INF, 0.0, other_peak - top)
    # Of fp32: a power of fp64 takes dozens of instructions, which small GPUs are slow at.
    scale = tl.exp2(shift.to(tl.float32) * LOG2E).to(tl.float64)
    other_scale = tl.exp2(other_shift.to(tl.float32) * LOG2E).to(tl.float64)
    slope = (slope + tl.maximum(shift, FLOOR) * total) * scale
    slope += (other_slope + tl.maximum(other_shift, FLOOR) * other_total) * other_scale
    tl.store(sums_ptr, top)
    tl.store(sums_ptr + stride_sums_c, total * scale + other_total * other_scale)
    tl.store(sums_ptr + 2 * stride_sums_c, slope)


@triton.jit(do_not_specialize=["column", "n_slots", "stride_tile_n", "stride_sums_c"])
def tile_scan_kernel(
    tile_ptr, slots_ptr, sums_ptr, column, width, n_slots, stride_tile_n, stride_sums_c,
    scale, kl_scale, inv_temperature: tl.float64, inv_kl_temperature: tl.float64,
    K: tl.constexpr, R: tl.constexpr, L: tl.constexpr, C: tl.constexpr,
    TAIL: tl.constexpr, TWO: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """A tile's row is added to the row's sums. Slots: the token's id, then the support's, -1 for none.

    stride_tile_n: in units of C elements.
    """
    BLOCK: tl.constexpr = R * L * C
    row = tl.program_id(0).to(tl.int64)
    row_ptr = tile_ptr + row * stride_tile_n * C
    sums_ptr += row
    slot_K = tl.arange(0, K)
    place_K = tl.load(slots_ptr + row * n_slots + slot_K, mask=slot_K < n_slots, other=-1) - column
    inside_K = (place_K >= 0) & (place_K < width)
    x_K = tl.load(row_ptr + place_K, mask=inside_K, other=NEG_INF)
    levels: tl.constexpr = 2 if TWO else 1
    picked_ptr = sums_ptr + (slot_K + _SUMS * levels).to(tl.int64) * stride_sums_c
    tl.store(picked_ptr, x_K.to(tl.float64), mask=inside_K)
    support_K = inside_K & (slot_K > 0)
    if TAIL:
        tl.debug_barrier()  # all are read before any is overwritten
        tl.store(row_ptr + place_K, tl.full((K,), NEG_INF, tl.float32).to(x_K.dtype), mask=support_K)
        tl.debug_barrier()

    whole = (width - 1) // BLOCK  # blocks before the last one, which may be cut off
    keep_L = tl.full((L,), 1, tl.int1)
    stats, top_L = no_stats(L), tl.full((L,), NEG_INF, tl.float32)
    ahead = _load(row_ptr, whole, width, BLOCK, False)
    for block in tl.range(0, whole, loop_unroll_factor=2):
        x = widen(ahead, tile_ptr.dtype.element_ty, False, NATIVE)
        ahead = _load(row_ptr, whole - 1 - block, width, BLOCK, True)
        top_L = tl.maximum(top_L, tl.max(tl.max(tl.reshape(x, (R, L, C)), 2), 0))
        stats = absorb(x, keep_L, stats, scale, kl_scale, R, L, C, False, True, TWO)
    x = widen(ahead, tile_ptr.dtype.element_ty, False, NATIVE)
    top_L = tl.maximum(top_L, tl.max(tl.max(tl.reshape(x, (R, L, C)), 2), 0))
    stats = absorb(x, keep_L, stats, scale, kl_scale, R, L, C, False, True, TWO)
    h, s, w, _kl_h, kl_s = merge_lanes(stats, True, TWO)
    top = tl.max(top_L, 0)
    kl_top = top
    if TAIL:
        if TWO:
            wide_K = tl.where(support_K, x_K.to(tl.float32), NEG_INF)
            h, s, w, _, _ = join_stats((h, s, w, h, s), few_stats(wide_K, scale, kl_scale, False), False)
            top = tl.maximum(top, tl.max(wide_K, 0))
        tl.debug_barrier()
        tl.store(row_ptr + place_K, x_K, mask=support_K)
    _add_to_sums(sums_ptr, stride_sums_c, top, s, w, scale, inv_temperature)
    if TWO:
        kl_sums_ptr = sums_ptr + _SUMS * stride_sums_c
        _add_to_sums(kl_sums_ptr, stride_sums_c, kl_top, kl_s, 0.0 * kl_s, kl_scale, inv_kl_temperature)


@triton.jit
def _store(row_ptr, block, g, width, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    offs_p = block * BLOCK + tl.arange(0, BLOCK)
    if WHOLE:
        tl.store(row_ptr + offs_p, g.to(row_ptr.dtype.element_ty))
    else:
        tl.store(row_ptr + offs_p, g.to(row_ptr.dtype.element_ty), mask=offs_p < width)


@triton.jit(do_not_specialize=["column", "n_slots", "stride_tile_n", "stride_rows_c"])
def tile_gradient_kernel(
    tile_ptr, slots_ptr, slot_grads_ptr, rows_ptr, idle_ptr,
    column, width, n_slots, stride_tile_n, stride_rows_c, scale, kl_scale,
    K: tl.constexpr, R: tl.constexpr, L: tl.constexpr, C: tl.constexpr,
    CURVED: tl.constexpr, TWO: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """A tile's row is replaced by the gradient. Slots: ids and their gradients, -1 for none.

    rows, a column of all rows after the other: a logit x and (level, curve) of 2^u (level + curve u) with u
    counted from it; another logit and level at kl_scale.
    """
    BLOCK: tl.constexpr = R * L * C
    row = tl.program_id(0).to(tl.int64)
    row_ptr = tile_ptr + row * stride_tile_n * C
    whole = (width - 1) // BLOCK
    if tl.load(idle_ptr + row) != 0:
        zero = tl.zeros((BLOCK,), tl.float32)
        _store(row_ptr, whole, zero, width, BLOCK, False)
        for block in tl.range(0, whole):
            _store(row_ptr, block, zero, width, BLOCK, True)
        return
    last = _load(row_ptr, whole, width, BLOCK, False)
    offs_p = tl.arange(0, BLOCK)
    # A block before the last: there is one, or nothing is read.
    ahead = tl.load(row_ptr + tl.maximum(whole - 1, 0) * BLOCK + offs_p, mask=(offs_p >= 0) & (whole > 0))
    slot_K = tl.arange(0, K)
    is_slot_K = slot_K < n_slots
    place_K = tl.load(slots_ptr + row * n_slots + slot_K, mask=is_slot_K, other=-1) - column
    grad_K = tl.load(slot_grads_ptr + row * n_slots + slot_K, mask=is_slot_K, other=0.0)
    rows_ptr += row
    top, level = tl.load(rows_ptr), tl.load(rows_ptr + stride_rows_c)
    curve, kl_h, kl_level = 0.0, 0.0, 0.0
    lost = _exponent_of(top, scale)
    if CURVED:
        curve = tl.load(rows_ptr + 2 * stride_rows_c)
        level = tl.fma(-lost, curve, level)
    if TWO:
        kl_top = tl.load(rows_ptr + 3 * stride_rows_c)
        kl_level = tl.load(rows_ptr + 4 * stride_rows_c) * tl.exp2(-_exponent_of(kl_top, kl_scale))
        kl_h = finite(kl_top * kl_scale)
    unit = tl.exp2(-lost)
    coefficients = (finite(top * scale), unit * level, unit * curve, kl_h, kl_level)

    g = softmax_gradient(
        widen(last, tile_ptr.dtype.element_ty, False, NATIVE), coefficients, scale, kl_scale, CURVED, TWO
    )
    _store(row_ptr, whole, g, width, BLOCK, False)
    for i in tl.range(1, whole, loop_unroll_factor=2):
        x = widen(ahead, tile_ptr.dtype.element_ty, False, NATIVE)
        ahead = _load(row_ptr, whole - 1 - i, width, BLOCK, True)
        g = softmax_gradient(x, coefficients, scale, kl_scale, CURVED, TWO)
        _store(row_ptr, whole - i, g, width, BLOCK, True)
    if whole > 0:
        g = softmax_gradient(
            widen(ahead, tile_ptr.dtype.element_ty, False, NATIVE), coefficients, scale, kl_scale, CURVED, TWO
        )
        _store(row_ptr, 0, g, width, BLOCK, True)
    tl.debug_barrier()
    inside_K = (place_K >= 0) & (place_K < width)
    tl.store(row_ptr + place_K, grad_K.to(row_ptr.dtype.element_ty), mask=inside_K)


@triton.jit
def _part(x_K, number, EMPTY: tl.constexpr, K: tl.constexpr, W: tl.constexpr):
    """Slots number W to number W + W - 1."""
    if K == W:
        return x_K
    else:
        chosen = (tl.arange(0, K // W) == number)[:, None]
        return tl.max(tl.where(chosen, tl.reshape(x_K, (K // W, W)), EMPTY), 0)


@triton.jit
def _merge_repeats(ids_K, logps_K, K: tl.constexpr, W: tl.constexpr):
    """The log of the mass of all slots with an id, at the largest (then first) of them; -inf elsewhere.

    A slot that is NaN stays NaN, and adds to no other.
    """
    slot_K = tl.arange(0, K)
    mass_K = tl.zeros((K,), tl.float32)
    for number in range(0, K // W):
        other = _part(logps_K, number, NEG_INF, K, W)[None, :]
        before = _part(slot_K, number, -1, K, W)[None, :] < slot_K[:, None]
        same = (_part(ids_K, number, -1, K, W)[None, :] == ids_K[:, None]) & (other > NEG_INF)
        larger = (other > logps_K[:, None]) | ((other == logps_K[:, None]) & before)
        power = tl.exp2((other - logps_K[:, None]) * LOG2E)
        mass_K += tl.sum(tl.where(same, tl.where(larger, _NOT_HERE, power), 0.0), 1)
    merged_K = tl.where(mass_K > 0, tl.fma(tl.log2(mass_K), LN2, logps_K), NEG_INF)
    return tl.where(logps_K != logps_K, logps_K, merged_K)


@triton.jit(do_not_specialize=["n_slots"])
def repeats_kernel(ids_ptr, logps_ptr, merged_ptr, n_slots, K: tl.constexpr, W: tl.constexpr):
    """The log of the mass of all slots with an id, at one of them; -inf at the others."""
    row = tl.program_id(0).to(tl.int64)
    slot_K = tl.arange(0, K)
    inside_K = slot_K < n_slots
    ids_K = tl.load(ids_ptr + row * n_slots + slot_K, mask=inside_K, other=-1)
    logps_K = tl.load(logps_ptr + row * n_slots + slot_K, mask=inside_K, other=NEG_INF)
    tl.store(merged_ptr + row * n_slots + slot_K, _merge_repeats(ids_K, logps_K, K, W), mask=inside_K)
