"""Blocks, statistics and gradient of a row, for the row kernel and the split kernel.

A block has R L C elements: R repeats of L lanes (threads) of C consecutive elements. These are 16 bytes, or
less if rows are not aligned. With scale = log2(e) / temperature, each lane has its own statistics

    h = max(x scale),  s = sum 2^(x scale - h),  w = sum 2^(x scale - h) (x scale - h).
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NEG_INF = tl.constexpr(float("-inf"))
FLOOR = tl.constexpr(-1.0e30)  # least exponent u in a product u * 2^u, because -inf * 0 would be NaN
LOWEST = tl.constexpr(-(2.0**31))  # lower exponents count as -inf


@triton.jit
def column(ptr, row):
    """Load a token's value, or return 0 if there is no such column."""
    return 0.0 if ptr is None else tl.load(ptr + row)


@triton.jit
def load_block(
    row_ptr, block, V: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, AGAIN: tl.constexpr
):
    """Load a block. Unless WHOLE, elements beyond the row are -inf. AGAIN: it is read once more later."""
    offs_v = block * BLOCK + tl.arange(0, BLOCK)
    policy: tl.constexpr = "evict_last" if AGAIN else "evict_first"
    if WHOLE:
        return tl.load(row_ptr + offs_v, eviction_policy=policy)
    else:
        return tl.load(row_ptr + offs_v, mask=offs_v < V, other=NEG_INF, eviction_policy=policy)


@triton.jit
def load_whole(row_ptr, block, BLOCK: tl.constexpr, AGAIN: tl.constexpr, PACKED: tl.constexpr):
    """Load a whole block. PACKED: load two 16-bit elements as one int32, which avoids copies in loops."""
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
    """Convert x to fp32. It has DTYPE or is packed (load_whole). bf16 needs one instruction per element.

    HELD: x was widened before. This is hidden from the compiler, which would keep the fp32 copy and spill.
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
    """Replace the -inf of empty statistics by 0."""
    return tl.where(h == NEG_INF, 0.0, h)


@triton.jit
def top_exponent(top, scale):
    """Return top * scale, or -inf below LOWEST, where rounding errors alone would make powers infinite.

    The fma rounds the product. The compiler could fuse a plain product into a difference without rounding it.
    """
    h = tl.fma(top, scale, 0.0)
    return tl.where(h < LOWEST, NEG_INF, h)


@triton.jit
def no_stats(L: tl.constexpr):
    none_L = tl.full((L,), NEG_INF, tl.float32)
    zero_L = tl.zeros((L,), tl.float32)
    return none_L, zero_L, zero_L, none_L, zero_L


@triton.jit
def _absorb_scaled(x, top_L, keep_L, h_L, s_L, w_L, scale, HOLES: tl.constexpr, ENTROPY: tl.constexpr):
    new_h_L = tl.maximum(h_L, top_exponent(top_L, scale))
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
    R: tl.constexpr, L: tl.constexpr, C: tl.constexpr, HOLES: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """Add an fp32 block to the lanes' statistics: (h, s, w) at scale and, if TWO, (h, s) at kl_scale.

    HOLES: skip the lanes whose keep_L is False.
    """
    h_L, s_L, w_L, kl_h_L, kl_s_L = stats
    x = tl.reshape(x, (R, L, C))
    top_L = tl.max(tl.max(x, 2), 0)
    if HOLES:
        top_L = tl.where(keep_L, top_L, NEG_INF)
    h_L, s_L, w_L = _absorb_scaled(x, top_L, keep_L, h_L, s_L, w_L, scale, HOLES, True)
    if TWO:
        kl_h_L, kl_s_L, _ = _absorb_scaled(x, top_L, keep_L, kl_h_L, kl_s_L, kl_s_L, kl_scale, HOLES, False)
    return h_L, s_L, w_L, kl_h_L, kl_s_L


@triton.jit
def merge_lanes(stats, TWO: tl.constexpr):
    """Merge the lanes' statistics. Without TWO, kl_h and kl_s repeat h and s."""
    h_L, s_L, w_L, kl_h_L, kl_s_L = stats
    h = tl.max(h_L, 0)
    shift_L = tl.maximum(h_L - finite(h), FLOOR)
    decay_L = tl.exp2(shift_L)
    s = tl.sum(s_L * decay_L, 0)
    w = tl.sum(decay_L * tl.fma(s_L, shift_L, w_L), 0)
    kl_h, kl_s = h, s
    if TWO:
        kl_h = tl.max(kl_h_L, 0)
        kl_s = tl.sum(kl_s_L * tl.exp2(tl.maximum(kl_h_L - finite(kl_h), FLOOR)), 0)
    return h, s, w, kl_h, kl_s


@triton.jit
def _few_stats(x, scale):
    h = top_exponent(tl.max(x, 0), scale)
    exponent = tl.fma(x, scale, -finite(h))
    power = tl.exp2(exponent)
    return h, tl.sum(power, 0), tl.sum(power * tl.maximum(exponent, FLOOR), 0)


@triton.jit
def _join(h_a, s_a, w_a, h_b, s_b, w_b):
    h = tl.maximum(h_a, h_b)
    shift_a = tl.maximum(h_a - finite(h), FLOOR)
    shift_b = tl.maximum(h_b - finite(h), FLOOR)
    decay_a = tl.exp2(shift_a)
    decay_b = tl.exp2(shift_b)
    w = decay_a * tl.fma(s_a, shift_a, w_a) + decay_b * tl.fma(s_b, shift_b, w_b)
    return h, tl.fma(s_a, decay_a, s_b * decay_b), w


@triton.jit
def with_support(off, x_K, scale, kl_scale, TWO: tl.constexpr):
    """Join the statistics off the support with the support's logits (-inf in empty slots)."""
    h_off, s_off, w_off, kl_h_off, kl_s_off = off
    h_K, s_K, w_K = _few_stats(x_K, scale)
    h, s, w = _join(h_off, s_off, w_off, h_K, s_K, w_K)
    kl_h, kl_s = h, s
    if TWO:
        h_K, s_K, _ = _few_stats(x_K, kl_scale)
        kl_h, kl_s, _ = _join(kl_h_off, kl_s_off, 0.0, h_K, s_K, 0.0)
    return h, s, w, kl_h, kl_s


@triton.jit
def gradient_coefficients(part, row, level, bend, kl_level, entropy, TWO: tl.constexpr):
    """Return softmax_gradient's coefficients for the sum level p + bend p (log p + entropy) + kl_level p_kl.

    p and p_kl are the softmax at each temperature. The h of `part` is subtracted from the exponents. `row`
    are the statistics of the whole row.
    """
    part_h, part_kl_h = part[0], part[3]
    shift = tl.where(part_h == NEG_INF, FLOOR, finite(part_h) - finite(row[0]))
    p = tl.exp2(shift) / row[1]  # p of an element whose power is 1
    from_level = p * tl.fma(bend, tl.fma(shift - tl.log2(row[1]), LN2, entropy), level)
    from_kl_level = 0.0
    if TWO:
        shift = tl.where(part_kl_h == NEG_INF, FLOOR, finite(part_kl_h) - finite(row[3]))
        from_kl_level = kl_level * (tl.exp2(shift) / row[4])
    return finite(part_h), from_level, p * bend * LN2, finite(part_kl_h), from_kl_level


@triton.jit
def softmax_gradient(x, coefficients, scale, kl_scale, CURVED: tl.constexpr, TWO: tl.constexpr):
    """Return 2^u (level + curve u) with u = x scale - h. If TWO, add kl_level 2^(x kl_scale - kl_h)."""
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
def sparse_gradient(
    token, token_inside, token_x, x_K, ids_K, id_logps_K, off, whole, entropy, teacher_mass, tail_q,
    dlogp, dkl, bend, scale, kl_scale, inv_temperature, inv_kl_temperature,
    HOLES: tl.constexpr, CURVED: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of dlogp logp + dkl kl - bend entropy at the token and the support.

    Return softmax_gradient's coefficients for all other entries, the token's gradient, whether the token is
    in the vocabulary but off the support, and the support's gradient (0 without a target).
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
        share = tl.where(
            off[4] == 0, 0.0, weighted(dkl, tail_q) / off[4]
        )  # dkl times the tail's ratio of teacher to student mass
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
def weighted(weight, value):
    """Return weight * value. A weight of 0 gives 0, even if the value is NaN."""
    return tl.where(weight != 0, weight * value, 0.0)
