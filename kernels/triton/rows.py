"""What the row kernel (triton/row_kernel.py) is made of: a row's blocks, statistics, gradient, policy terms.

One program works on one row, in blocks of R L C elements: R repeats of L lanes (the program's threads) of C
consecutive elements (16 bytes; fewer where rows are not aligned). Each lane keeps statistics of its own
elements alone, so nothing crosses lanes while a row streams. Powers are of two: a scale is
log2(e) / temperature, and (h, s, w) stand for

    h = max x scale,    s = sum 2^(x scale - h),    w = sum 2^(x scale - h) (x scale - h).

Pairs, not a log-sum-exp: differences of large logits keep their digits.

Shapes: V vocabulary, L lanes.
"""

import triton
import triton.language as tl

from smopd.kernels import types

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NEG_INF = tl.constexpr(float("-inf"))
FLOOR = tl.constexpr(-1.0e30)  # of an exponent that is multiplied by its power: -inf * 0 is NaN

_LOG_RATIO_BOUND = tl.constexpr(types.LOG_RATIO_BOUND)
_CLIP_LOW = tl.constexpr(types.CLIP_LOW)
_CLIP_HIGH = tl.constexpr(types.CLIP_HIGH)
_CLIP_DUAL = tl.constexpr(types.CLIP_DUAL)
_CLIP_LOG_RATIO = tl.constexpr(types.CLIP_LOG_RATIO)
_CLIP_REVERSE_LOW = tl.constexpr(types.CLIP_REVERSE_LOW)
_CLIP_REVERSE_HIGH = tl.constexpr(types.CLIP_REVERSE_HIGH)


@triton.jit
def column(ptr, row):
    """A token's value; 0 of a column that is not there."""
    return 0.0 if ptr is None else tl.load(ptr + row)


@triton.jit
def load_block(
    row_ptr, block, V: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, AGAIN: tl.constexpr
):
    """A block of the row, -inf behind the row's end unless WHOLE. AGAIN: it will be read once more."""
    offs_v = block * BLOCK + tl.arange(0, BLOCK)
    policy: tl.constexpr = "evict_last" if AGAIN else "evict_first"
    if WHOLE:
        return tl.load(row_ptr + offs_v, eviction_policy=policy)
    else:
        return tl.load(row_ptr + offs_v, mask=offs_v < V, other=NEG_INF, eviction_policy=policy)


@triton.jit
def load_whole(row_ptr, block, BLOCK: tl.constexpr, AGAIN: tl.constexpr, PACKED: tl.constexpr):
    """load_block of a block that is not cut off, for a loop to carry. PACKED: two 16-bit elements an int32.

    A register of a loop that holds two separate values is copied at the loop's end, and the copy waits for a
    load that nothing needs yet.
    """
    if PACKED:
        pairs_ptr = row_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        offs = block * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
        return tl.load(pairs_ptr + offs, eviction_policy="evict_last" if AGAIN else "evict_first")
    else:
        return load_block(row_ptr, block, 0, BLOCK, True, AGAIN)


@triton.jit
def store_block(row_ptr, block, x, V: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    offs_v = block * BLOCK + tl.arange(0, BLOCK)
    x = x.to(row_ptr.dtype.element_ty)
    if WHOLE:
        tl.store(row_ptr + offs_v, x, eviction_policy="evict_first")
    else:
        tl.store(row_ptr + offs_v, x, mask=offs_v < V, eviction_policy="evict_first")


@triton.jit
def zero_row(row_ptr, V: tl.constexpr, BLOCK: tl.constexpr):
    for block in range(0, tl.cdiv(V, BLOCK)):
        store_block(row_ptr, block, tl.zeros((BLOCK,), tl.float32), V, BLOCK, False)


@triton.jit
def widen(x, DTYPE: tl.constexpr, HELD: tl.constexpr, NATIVE: tl.constexpr):
    """x, of DTYPE or two of them packed (load_whole), in fp32; bf16 in one instruction an element.

    HELD: opaque to the compiler, which would else keep the fp32 copies of held blocks from before, and spill.
    """
    if x.dtype == tl.int32:
        if NATIVE and HELD:
            x = tl.inline_asm_elementwise(
                "mov.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1
            )
        if tl.bfloat16 == DTYPE:
            low, high = (x << 16).to(tl.float32, bitcast=True), (x & -65536).to(tl.float32, bitcast=True)
        else:
            low = x.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
            high = (x >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        return tl.reshape(tl.join(low, high), (2 * x.shape[0],))
    elif NATIVE and tl.bfloat16 == DTYPE:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=&r,=&r,r", [x],
            dtype=tl.float32, is_pure=not HELD, pack=2,
        )  # fmt: skip
    elif NATIVE and HELD and tl.float16 == DTYPE:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
        return x.to(tl.float32)
    else:
        return x.to(tl.float32)


@triton.jit
def finite(h):
    """h as a reference to subtract: 0 where nothing was seen yet."""
    return tl.where(h == NEG_INF, 0.0, h)


@triton.jit
def no_stats(L: tl.constexpr):
    """L lanes that have seen nothing."""
    none_L = tl.full((L,), NEG_INF, tl.float32)
    zero_L = tl.zeros((L,), tl.float32)
    return none_L, zero_L, zero_L, none_L, zero_L


@triton.jit
def _absorb_scaled(x, top_L, keep_L, h_L, s_L, w_L, scale, HOLES: tl.constexpr, ENTROPY: tl.constexpr):
    new_h_L = tl.maximum(h_L, top_L * scale)
    reference_L = finite(new_h_L)
    shift_L = tl.maximum(h_L - reference_L, FLOOR)
    decay_L = tl.exp2(shift_L)
    exponent = tl.fma(x, scale, -reference_L[None, :, None])
    power = tl.exp2(exponent)
    more_s_L = tl.sum(tl.sum(power, 2), 0)
    if HOLES:
        more_s_L = tl.where(keep_L, more_s_L, 0.0)
    if ENTROPY:
        more_w_L = tl.sum(tl.sum(power * tl.maximum(exponent, FLOOR), 2), 0)
        if HOLES:
            more_w_L = tl.where(keep_L, more_w_L, 0.0)
        w_L = tl.fma(decay_L, tl.fma(s_L, shift_L, w_L), more_w_L)
    return new_h_L, tl.fma(decay_L, s_L, more_s_L), w_L


@triton.jit
def absorb(
    x, keep_L, stats, scale, kl_scale,
    R: tl.constexpr, L: tl.constexpr, C: tl.constexpr,
    HOLES: tl.constexpr, ENTROPY: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """A block (fp32) added to the lanes' statistics: (h, s, w) at scale and, if TWO, (h, s) at kl_scale.

    HOLES: a lane whose keep is False leaves its part out.
    """
    h_L, s_L, w_L, kl_h_L, kl_s_L = stats
    x = tl.reshape(x, (R, L, C))
    top_L = tl.max(tl.max(x, 2), 0)
    if HOLES:
        top_L = tl.where(keep_L, top_L, NEG_INF)
    h_L, s_L, w_L = _absorb_scaled(x, top_L, keep_L, h_L, s_L, w_L, scale, HOLES, ENTROPY)
    if TWO:
        kl_h_L, kl_s_L, _ = _absorb_scaled(x, top_L, keep_L, kl_h_L, kl_s_L, kl_s_L, kl_scale, HOLES, False)
    return h_L, s_L, w_L, kl_h_L, kl_s_L


@triton.jit
def merge_lanes(stats, ENTROPY: tl.constexpr, TWO: tl.constexpr):
    """The lanes' statistics as one. Without TWO the second pair repeats the first."""
    h_L, s_L, w_L, kl_h_L, kl_s_L = stats
    h = tl.max(h_L, 0)
    shift_L = tl.maximum(h_L - finite(h), FLOOR)
    decay_L = tl.exp2(shift_L)
    s = tl.sum(s_L * decay_L, 0)
    w = 0.0
    if ENTROPY:
        w = tl.sum(decay_L * tl.fma(s_L, shift_L, w_L), 0)
    kl_h, kl_s = h, s
    if TWO:
        kl_h = tl.max(kl_h_L, 0)
        kl_s = tl.sum(kl_s_L * tl.exp2(tl.maximum(kl_h_L - finite(kl_h), FLOOR)), 0)
    return h, s, w, kl_h, kl_s


@triton.jit
def _few_stats_scaled(x, scale):
    h = tl.fma(tl.max(x, 0), scale, 0.0)  # a product would be drawn into join_stats' difference, unrounded
    exponent = tl.fma(x, scale, -finite(h))
    power = tl.exp2(exponent)
    return h, tl.sum(power, 0), tl.sum(power * tl.maximum(exponent, FLOOR), 0)


@triton.jit
def few_stats(x, scale, kl_scale, TWO: tl.constexpr):
    """The statistics of a few elements, one-dimensional."""
    h, s, w = _few_stats_scaled(x, scale)
    kl_h, kl_s = h, s
    if TWO:
        kl_h, kl_s, _ = _few_stats_scaled(x, kl_scale)
    return h, s, w, kl_h, kl_s


@triton.jit
def _join_scaled(h_a, s_a, w_a, h_b, s_b, w_b):
    h = tl.maximum(h_a, h_b)
    shift_a = tl.maximum(h_a - finite(h), FLOOR)
    shift_b = tl.maximum(h_b - finite(h), FLOOR)
    decay_a = tl.exp2(shift_a)
    decay_b = tl.exp2(shift_b)
    w = decay_a * tl.fma(s_a, shift_a, w_a) + decay_b * tl.fma(s_b, shift_b, w_b)
    return h, tl.fma(s_a, decay_a, s_b * decay_b), w


@triton.jit
def join_stats(a, b, TWO: tl.constexpr):
    """The statistics of two disjoint parts of a row as one."""
    h_a, s_a, w_a, kl_h_a, kl_s_a = a
    h_b, s_b, w_b, kl_h_b, kl_s_b = b
    h, s, w = _join_scaled(h_a, s_a, w_a, h_b, s_b, w_b)
    kl_h, kl_s = h, s
    if TWO:
        kl_h, kl_s, _ = _join_scaled(kl_h_a, kl_s_a, 0.0, kl_h_b, kl_s_b, 0.0)
    return h, s, w, kl_h, kl_s


@triton.jit
def gradient_coefficients(part, row, level, bend, kl_level, entropy, TWO: tl.constexpr):
    """softmax_gradient's for elements whose powers refer to a part of the row's statistics, h to kl_level.

    level p + bend p (log p + entropy) + kl_level p_kl, p the row's softmax, is what the gradient shall be.
    """
    part_h, part_kl_h = part[0], part[3]
    shift = tl.where(part_h == NEG_INF, FLOOR, finite(part_h) - finite(row[0]))
    p = tl.exp2(shift) / row[1]  # of an element whose power is 1
    from_level = p * tl.fma(bend, tl.fma(shift - tl.log2(row[1]), LN2, entropy), level)
    from_kl_level = 0.0
    if TWO:
        shift = tl.where(part_kl_h == NEG_INF, FLOOR, finite(part_kl_h) - finite(row[3]))
        from_kl_level = kl_level * (tl.exp2(shift) / row[4])
    return finite(part_h), from_level, p * bend * LN2, finite(part_kl_h), from_kl_level


@triton.jit
def softmax_gradient(x, coefficients, scale, kl_scale, CURVED: tl.constexpr, TWO: tl.constexpr):
    """2^u (level + curve u) with u = x scale - h, and, if TWO, kl_level 2^(x kl_scale - kl_h) added."""
    h, level, curve, kl_h, kl_level = coefficients
    u = tl.fma(x, scale, -h)
    if CURVED:
        u = tl.maximum(u, FLOOR)
        gradient = tl.exp2(u) * tl.fma(u, curve, level)
    else:
        gradient = tl.exp2(u) * level
    if TWO:
        gradient = tl.fma(tl.exp2(tl.fma(x, kl_scale, -kl_h)), kl_level, gradient)
    return gradient


@triton.jit
def write_block(
    grad_row_ptr, block, x, coefficients, scale, kl_scale,
    V: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, CURVED: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """The gradient of a block x (fp32)."""
    gradient = softmax_gradient(x, coefficients, scale, kl_scale, CURVED, TWO)
    store_block(grad_row_ptr, block, gradient, V, BLOCK, WHOLE)


@triton.jit
def sparse_gradient(
    token, token_inside, token_x, x_K, ids_K, id_logps_K, off, whole, entropy, teacher_mass, tail_q,
    dlogp, dkl, bend, scale, kl_scale, inv_temperature, inv_kl_temperature,
    HOLES: tl.constexpr, CURVED: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """The gradient of dlogp logp + dkl kl - bend entropy in a row of logits.

    Returns softmax_gradient's coefficients for all entries but the support's and the token's; the token's
    gradient, and whether it lies off the support; the support's (0 without a target: x_K is None).
    """
    dlogp = tl.where(token_inside | (dlogp == 0), dlogp, float("nan")) * inv_temperature
    dkl *= inv_kl_temperature
    bend *= inv_temperature
    level = -dlogp
    kl_level = weighted(dkl, teacher_mass + tail_q)
    if not TWO:
        level += kl_level
    off_h, off_level, off_curve, off_kl_h, off_kl_level = gradient_coefficients(
        off, whole, level, bend, kl_level, entropy, TWO
    )
    if HOLES:
        share = tl.where(off[4] == 0, 0.0, weighted(dkl, tail_q) / off[4])  # of the tail's teacher mass
        if TWO:
            off_kl_level -= share
        else:
            off_level -= share
    coefficients = (off_h, off_level, off_curve, off_kl_h, off_kl_level)
    token_grad = softmax_gradient(token_x, coefficients, scale, kl_scale, CURVED, TWO) + dlogp
    token_apart = token_inside
    grad_K = 0.0
    if x_K is not None:
        at_support = coefficients
        if HOLES:
            at_support = gradient_coefficients(whole, whole, level, bend, kl_level, entropy, TWO)
        grad_K = softmax_gradient(x_K, at_support, scale, kl_scale, CURVED, TWO)
        grad_K -= weighted(dkl, tl.exp2(id_logps_K * LOG2E))
        grad_K += tl.where(ids_K == token, dlogp, 0.0)
        at_token = (id_logps_K > NEG_INF) & (ids_K == token)
        token_apart &= tl.sum(at_token.to(tl.int32), 0) == 0
    return coefficients, token_grad, token_apart, grad_K


@triton.jit
def _larger(a, b):
    """The larger one; NaN where either is (they have a factor in common)."""
    return tl.where(a >= b, a, b)


@triton.jit
def policy_terms(raw, adv, reverse_adv, low, high, dual_clip, ppo, REVERSE: tl.constexpr):
    """(surrogate, slope in logp, reverse term, slope, clip bits) at a log ratio, as terms.policy_terms.

    dual_clip: inf is none. ppo: the form of the reverse term.
    """
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


@triton.jit
def weighted(weight, value):
    """weight * value; 0 where the weight is, whatever the value."""
    return tl.where(weight != 0, weight * value, 0.0)
