"""The split kernel: PARTS programs share a row, and each logit is read once (docs/kernels.md).

Each program holds its part in registers. The programs exchange their statistics and the logits of support and
token as 32-bit words. A word is written once and polled until it differs from POISON, without a memory fence.

There is no deadlock: a program waits only for the other programs of its row, which have consecutive numbers.
GPUs start programs in the order of their numbers. CUDA does not promise this, but CUB's scans rely on it,
too. A wait ends after _PATIENCE polls, and missing words are then NaN. A program reads and writes only its
part, so the gradient may overwrite the logits. PHASE 0 is the whole computation. Triton's interpreter runs
programs one after the other and needs two launches: PHASE 1 ends at the exchange, and PHASE 2 starts there.

With Triton 3.6 and bf16 logits at V = 151,936, the speed is 97% of that of a copy on an H100 and 87% on an
H200. Without the prefetch it is 96% and 79%. Prefetch distances of 66 to 198 programs are equally fast, but
396 is too far. These were not better on the H200: persistent programs that load the next row while they store
(78%), parts of eight warps (85%), and five parts (85 to 88%, but less with the default settings).

The shapes are those of row_kernel. P is PARTS padded to a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from smopd.kernels.triton.rows import (
    LOWEST,
    NEG_INF,
    absorb,
    column,
    finite,
    merge_lanes,
    softmax_gradient,
    sparse_gradient,
    top_exponent,
    widen,
    with_support,
)
from smopd.kernels.triton.target import SEGMENT_BITS, segments
from smopd.kernels.triton.terms import (
    all_zero,
    load_weights,
    loss_slopes,
    store_terms,
    store_zeros,
    support_terms,
    token_terms,
)

POISON = tl.constexpr(-1)  # as fp32, a NaN that arithmetic does not produce
WORDS = 8  # words per part: the statistics h, s, w, padded to a 32-byte sector
_WORDS = tl.constexpr(WORDS)
_SEGMENT_BITS = tl.constexpr(SEGMENT_BITS)
_BLOCK_MASK = tl.constexpr((1 << SEGMENT_BITS) - 1)
_QUIET = tl.constexpr(0x7FC00000)  # replaces every NaN
_PATIENCE = tl.constexpr(1 << 24)  # polls, each of about a microsecond


@triton.jit
def _bits(x):
    return tl.where(x != x, _QUIET, x.to(tl.int32, bitcast=True))


@triton.jit
def _larger(a, b, NATIVE: tl.constexpr):
    """Return the elementwise maximum, ignoring NaN. One instruction compares two 16-bit elements."""
    if NATIVE and a.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "max.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    elif NATIVE and a.dtype == tl.float16:
        return tl.inline_asm_elementwise(
            "max.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        return tl.maximum(a.to(tl.float32), b.to(tl.float32)).to(a.dtype)


@triton.jit
def _widen_bounded(x, lowest, NATIVE: tl.constexpr):
    """Return max(x, lowest) in fp32. NaN stays NaN."""
    if NATIVE and x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; max.NaN.bf16x2 t, $2, $3; shl.b32 $0, t, 16; and.b32 $1, t, 0xffff0000; }",
            "=&r,=&r,r,r", [x, tl.zeros(x.shape, tl.bfloat16) + lowest.to(tl.bfloat16)],
            dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        x = x.to(tl.float32)
        return tl.where(x < lowest, lowest, x)


@triton.jit
def _part_top(
    held, skipped_L, scale, BLOCKS: tl.constexpr, R: tl.constexpr, TAIL_R: tl.constexpr,
    L: tl.constexpr, C: tl.constexpr, HOLES: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Return each lane's maximum h over the held blocks (see rows.py)."""
    top_L = tl.full((L,), NEG_INF, tl.float32)
    if HOLES:
        for i in tl.static_range(BLOCKS):
            keep_L = ((skipped_L >> i) & 1) == 0
            x = tl.reshape(held[i].to(tl.float32), (TAIL_R if i == BLOCKS - 1 else R, L, C))
            top_L = tl.maximum(top_L, tl.where(keep_L, tl.max(tl.max(x, 2), 0), NEG_INF))
    else:
        if BLOCKS > 1:
            top = held[0]
            for i in tl.static_range(1, BLOCKS - 1):
                top = _larger(top, held[i], NATIVE)
            top_L = tl.max(tl.max(tl.reshape(top.to(tl.float32), (R, L, C)), 2), 0)
        x = tl.reshape(held[BLOCKS - 1].to(tl.float32), (TAIL_R, L, C))
        top_L = tl.maximum(top_L, tl.max(tl.max(x, 2), 0))
    return top_exponent(top_L, scale)


@triton.jit
def _part_sums(
    held, h_L, skipped_L, scale, BLOCKS: tl.constexpr, R: tl.constexpr, TAIL_R: tl.constexpr,
    L: tl.constexpr, C: tl.constexpr, HOLES: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Return each lane's (h, s, w, h, s) over the held blocks (see rows.py)."""
    lowest = LOWEST / scale  # smaller logits are raised to this, so that differences are finite
    s_L, w_L = tl.zeros((L,), tl.float32), tl.zeros((L,), tl.float32)
    for i in tl.static_range(BLOCKS):
        x = tl.reshape(_widen_bounded(held[i], lowest, NATIVE), (TAIL_R if i == BLOCKS - 1 else R, L, C))
        exponent = tl.fma(x, scale, -finite(h_L)[None, :, None])
        power = tl.exp2(exponent)
        more_s_L = tl.sum(tl.sum(power, 2), 0)
        more_w_L = tl.sum(tl.sum(power * exponent, 2), 0)
        if HOLES:
            keep_L = ((skipped_L >> i) & 1) == 0
            more_s_L = tl.where(keep_L, more_s_L, 0.0)
            more_w_L = tl.where(keep_L, more_w_L, 0.0)
        s_L += more_s_L
        w_L += more_w_L
    return h_L, s_L, w_L, h_L, s_L


@triton.jit
def _received(ptr_P, there_P, picked_ptr, TARGET: tl.constexpr, K: tl.constexpr):
    """Return the words of a row and whether one of them is still POISON."""
    h_P = tl.load(ptr_P, mask=there_P, other=0, volatile=True)
    s_P = tl.load(ptr_P + 1, mask=there_P, other=0, volatile=True)
    w_P = tl.load(ptr_P + 2, mask=there_P, other=0, volatile=True)
    token = tl.load(picked_ptr, volatile=True)
    missing_P = (h_P == POISON) | (s_P == POISON) | (w_P == POISON)
    waiting = (tl.max(missing_P.to(tl.int32), 0) != 0) | (token == POISON)
    x_K = token
    if TARGET:
        x_K = tl.load(picked_ptr + K + tl.arange(0, K), volatile=True)
        waiting |= tl.max((x_K == POISON).to(tl.int32), 0) != 0
    return (h_P, s_P, w_P, token, x_K), waiting


@triton.jit
def _load_part(part_ptr, start, width, SIZE: tl.constexpr, WHOLE: tl.constexpr):
    """Load SIZE elements from `start` on. Unless WHOLE, elements beyond the part are -inf."""
    offs = start + tl.arange(0, SIZE)
    if WHOLE:
        return tl.load(part_ptr + offs)
    else:
        return tl.load(part_ptr + offs, mask=offs < width, other=NEG_INF)


@triton.jit
def _store_part(part_ptr, start, width, x, WHOLE: tl.constexpr):
    offs = start + tl.arange(0, x.shape[0])
    x = x.to(part_ptr.dtype.element_ty)
    if WHOLE:
        tl.store(part_ptr + offs, x, eviction_policy="evict_first")
    else:
        tl.store(part_ptr + offs, x, mask=offs < width, eviction_policy="evict_first")


@triton.jit
def _prefetch_part(
    logits_ptr, number, n_rows, stride_n,
    V: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Prefetch the part of program `number` into the L2 cache: one instruction of one thread (from sm_90)."""
    row = (number // PARTS).to(tl.int64)
    if row < n_rows:
        first = number % PARTS * PART
        address = (logits_ptr + row * stride_n * C + first).to(tl.int64)
        size: tl.constexpr = logits_ptr.dtype.element_ty.primitive_bitwidth // 8
        n_bytes = tl.minimum(V - first, PART) * size // 16 * 16
        tl.inline_asm_elementwise(
            "{ .reg .pred p; mov.u32 $0, %tid.x; setp.eq.u32 p, $0, 0; setp.ne.and.u32 p, $2, 0, p;"
            " @p cp.async.bulk.prefetch.L2.global [$1], $2; }",
            "=&r,l,r", [address, n_bytes], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _zero_part(part_ptr, width, SIZE: tl.constexpr):
    for start in range(0, width, SIZE):
        _store_part(part_ptr, start, width, tl.zeros((SIZE,), tl.float32), False)


@triton.jit(do_not_specialize=["n_rows", "there"])
def split_kernel(
    logits_ptr, grad_ptr, token_ids_ptr,
    ids_ptr, logps_ptr, id_logps_ptr, masses_ptr, holes_ptr, skipped_ptr,
    adv_ptr, old_logp_ptr, pg_weight_ptr, kl_weight_ptr, ent_weight_ptr, reverse_adv_ptr, reverse_weight_ptr,
    terms_ptr, clipped_ptr, exchange_ptr,
    there, n_rows, stride_logits_n, stride_grad_n,
    scale, _kl_scale, inv_temperature, _inv_kl_temperature,
    clip_low, clip_high, dual_clip, opd_coef, entropy_coef,
    V: tl.constexpr, K: tl.constexpr, R: tl.constexpr, L: tl.constexpr, C: tl.constexpr,
    PARTS: tl.constexpr, P: tl.constexpr, PART: tl.constexpr, BLOCKS: tl.constexpr, TAIL_R: tl.constexpr,
    WHOLE: tl.constexpr, PHASE: tl.constexpr, CURVED: tl.constexpr, NATIVE: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Compute a part of a row. The arguments are those of row_kernel with one temperature, and also:

    exchange_ptr: WORDS words for each part of each row. After these, each row has 2 K words. The first has
        the token's logit, the last K have the slots' logits.
    PART: number of elements of a part. The last part may have fewer. A part has BLOCKS blocks of R L C
        elements, but its last block has TAIL_R repeats. The first WHOLE blocks are full in every part.
    AHEAD: program i prefetches the part of program i + AHEAD. 0: no prefetch.
    """
    # One warp polls all words, because a barrier in the loop would wait for warps that have left it.
    tl.static_assert((P <= 32) & (K <= 32))
    TARGET: tl.constexpr = ids_ptr is not None
    REVERSE: tl.constexpr = reverse_adv_ptr is not None
    HOLES: tl.constexpr = holes_ptr is not None
    BLOCK: tl.constexpr = R * L * C
    DTYPE: tl.constexpr = logits_ptr.dtype.element_ty

    row = (tl.program_id(0) // PARTS).to(tl.int64)
    part = tl.program_id(0) % PARTS
    first = part * PART
    width = tl.minimum(V - first, PART)
    row_ptr = logits_ptr + row * stride_logits_n * C
    part_ptr = row_ptr + first
    grad_part_ptr = grad_ptr + row * stride_grad_n * C + first

    held = ()
    for i in tl.static_range(BLOCKS):
        held = held + (  # noqa: RUF005  (Triton has no star expressions)
            _load_part(part_ptr, i * BLOCK, width, (TAIL_R if i == BLOCKS - 1 else R) * L * C, i < WHOLE),
        )
    if AHEAD > 0:
        _prefetch_part(logits_ptr, tl.program_id(0) + AHEAD, n_rows, stride_logits_n, V, C, PARTS, PART)
    token_id = tl.load(token_ids_ptr + row)
    skipped_L = tl.zeros((L,), tl.int32)
    teacher_mass = 0.0
    tail_q = 0.0
    if TARGET:
        offs_K = row * K + tl.arange(0, K)
        ids_K = tl.load(ids_ptr + offs_K)
        logps_K = tl.load(logps_ptr + offs_K)
        id_logps_K = logps_K if id_logps_ptr is None else tl.load(id_logps_ptr + offs_K)
        teacher_mass = tl.load(masses_ptr + row)
    else:
        ids_K, logps_K, id_logps_K, first_K, x_K = None, None, None, None, None
    if HOLES:
        tail_q = tl.load(masses_ptr + n_rows + row)
        if PARTS > 1:
            lane_L = part * L + tl.arange(0, L)
            for k in tl.range(0, K, loop_unroll_factor=1):
                segment = tl.load(skipped_ptr + row * K + k)  # see RowTargets
                block = segment & _BLOCK_MASK
                skipped_L |= tl.where(segment >> _SEGMENT_BITS == lane_L, 1 << block, 0)
        else:
            skipped_L = tl.load(skipped_ptr + row * L + tl.arange(0, L)).to(tl.int32)
        EACH: tl.constexpr = R * C if K * R * C > L else L // K
        offs_E = row * K + tl.arange(0, K * EACH) // EACH
        ids_E, holes_E = tl.load(ids_ptr + offs_E), tl.load(holes_ptr + offs_E)
    weights = load_weights(pg_weight_ptr, kl_weight_ptr, ent_weight_ptr, reverse_weight_ptr, row, there)
    if all_zero(weights):
        # All programs of the row return here, so none waits.
        if PHASE != 1:
            if part == 0:
                store_zeros(terms_ptr, clipped_ptr, row, n_rows)
            _zero_part(grad_part_ptr, width, BLOCK)
        return
    adv, old_logp = tl.load(adv_ptr + row), tl.load(old_logp_ptr + row)
    reverse_adv = column(reverse_adv_ptr, row)

    # Each program publishes those logits of token and support that are in its part. Part 0 fills empty slots.
    stats_ptr = exchange_ptr + row * (PARTS * _WORDS)
    picked_ptr = exchange_ptr + n_rows.to(tl.int64) * (PARTS * _WORDS) + row * (2 * K)
    token_inside = (token_id >= 0) & (token_id < V)
    token = token_id.to(tl.int32)
    token_here = token_inside & (token // PART == part)
    if TARGET:
        first_K = id_logps_K > NEG_INF
        live_K = logps_K > NEG_INF
        here_K = live_K & (ids_K // PART == part)
        x_K = tl.load(row_ptr + ids_K, mask=here_K, other=NEG_INF).to(tl.float32)
    if PHASE != 2:
        token_x = tl.load(row_ptr + token, mask=token_here, other=float("nan")).to(tl.float32)
        if HOLES:
            # Load the other elements of the segments that the lanes' sums skip (target.py).
            own_holes_E = tl.where(ids_E // PART == part, holes_E, 0)
            around_E = segments(part_ptr, ids_E % PART, own_holes_E, width, R, L, C, EACH)
        # The maxima hide the latency of these loads.
        h_L = _part_top(held, skipped_L, scale, BLOCKS, R, TAIL_R, L, C, HOLES, NATIVE)
        tl.atomic_xchg(
            picked_ptr, _bits(token_x), mask=token_here | ((part == 0) & ~token_inside), sem="relaxed"
        )
        if TARGET:
            speaks_K = here_K | ((part == 0) & ~live_K)
            tl.atomic_xchg(picked_ptr + K + tl.arange(0, K), _bits(x_K), mask=speaks_K, sem="relaxed")
        stats = _part_sums(held, h_L, skipped_L, scale, BLOCKS, R, TAIL_R, L, C, HOLES, NATIVE)
        if HOLES:
            stats = absorb(around_E, skipped_L, stats, scale, scale, K * EACH // L, L, 1, False, False)
        h, s, w, _, _ = merge_lanes(stats, False)
        word = tl.arange(0, _WORDS)
        number = tl.where(word == 0, h, tl.where(word == 1, s, tl.where(word == 2, w, 0.0)))
        tl.atomic_xchg(stats_ptr + part * _WORDS + word, _bits(number), mask=word < 3, sem="relaxed")
    if PHASE == 1:
        return

    part_P = tl.arange(0, P)
    there_P = part_P < PARTS
    ptr_P = stats_ptr + part_P * _WORDS
    words, waiting = _received(ptr_P, there_P, picked_ptr, TARGET, K)
    polls = 0
    while waiting & (polls < _PATIENCE):
        words, waiting = _received(ptr_P, there_P, picked_ptr, TARGET, K)
        polls += 1
    h_P, s_P, w_P, token_x, all_x_K = words
    h_P = tl.where(there_P, h_P.to(tl.float32, bitcast=True), NEG_INF)
    s_P = s_P.to(tl.float32, bitcast=True)
    w_P = w_P.to(tl.float32, bitcast=True)
    token_x = token_x.to(tl.float32, bitcast=True)
    all_x_K = all_x_K.to(tl.float32, bitcast=True)
    off = merge_lanes((h_P, s_P, w_P, h_P, s_P), False)
    whole = off
    if HOLES:
        whole = with_support(off, tl.where(first_K, all_x_K, NEG_INF), scale, scale, False)
    values = token_terms(
        token_x, whole, scale, adv, old_logp, reverse_adv, clip_low, clip_high, dual_clip, there, REVERSE
    )
    if part == 0:
        kl, student_mass = support_terms(
            all_x_K, logps_K, first_K, off, whole, teacher_mass, tail_q, scale, TARGET, HOLES
        )
        store_terms(terms_ptr, clipped_ptr, row, n_rows, kl, (teacher_mass, student_mass), values)

    dlogp, dkl, bend, idle = loss_slopes(weights, values, opd_coef, entropy_coef, TARGET, REVERSE, CURVED)
    if idle:
        _zero_part(grad_part_ptr, width, BLOCK)
        return
    coefficients, token_grad, token_apart, grad_K = sparse_gradient(
        token, token_inside, token_x, x_K, ids_K, id_logps_K, off, whole, values[1], teacher_mass, tail_q,
        dlogp, dkl, bend, scale, scale, inv_temperature, inv_temperature, HOLES, CURVED, False,
    )  # fmt: skip
    tl.debug_barrier()  # all entries above must be read before any is written
    for i in tl.static_range(BLOCKS):
        x = widen(held[i], DTYPE, True, NATIVE)
        gradient = softmax_gradient(x, coefficients, scale, scale, CURVED, False)
        _store_part(grad_part_ptr, i * BLOCK, width, gradient, i < WHOLE)
    tl.debug_barrier()
    out: tl.constexpr = grad_ptr.dtype.element_ty
    if TARGET:
        tl.store(grad_part_ptr + ids_K - first, grad_K.to(out), mask=first_K & here_K)
    tl.store(grad_part_ptr + token - first, token_grad.to(out), mask=token_apart & token_here)
