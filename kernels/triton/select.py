"""The second kernel of top-kappa. It selects the kappa best elements of a row from one word per segment.

A segment is the part of a block that one thread reads. Its word contains its largest value, the round in
which this value first occurs, and a bound for its other chunks. The kernel lists all segments that reach the
kappa-th best of the threads' maxima. If there are too many, it searches for a higher threshold in memory. The
kappa best segments each yield their best element. A segment is read again as long as its bound may beat the
worst element so far.

Shapes: K = kappa padded, L slots of the list, R rounds of a block, T threads, E elements of a chunk as in
topk.py, X = R * E elements of a segment.
"""

from __future__ import annotations

import triton
import triton.language as tl

from smopd.kernels.triton.mixture import largest


def listed_log(log_k: int) -> int:
    """Return log2 of the list's length: 2 K, or 8 K above kappa 64, as many segments reach a low maximum."""
    return log_k + 1 if log_k < 7 else log_k + 3


_LOWEST_32 = tl.constexpr(-(2**31))
_LOWEST_64 = tl.constexpr(-(2**63))
_HIGHEST_32 = tl.constexpr(2**31 - 1)
_NAN_ORDER = tl.constexpr(0x7FFFFFFF)
_NO_ID = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _order_of_finite(x, HALF: tl.constexpr):
    bits = x.to(tl.int32, bitcast=True)
    if HALF:  # the bits of fp16 are not the upper half of the fp32 bits; for bf16 they are
        bits = x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16
    sign = bits >> 31
    return ((bits & 0x7FFFFFFF) ^ sign) - sign


@triton.jit
def _order_of(x, HALF: tl.constexpr):
    """Map fp32 to int32 in the same order. -0 equals +0, and NaN is above +inf.

    For a 16-bit value other than NaN, the result uses only the upper 16 bits.
    """
    return tl.where(x != x, _NAN_ORDER, _order_of_finite(x, HALF))


@triton.jit
def _value_of(order, HALF: tl.constexpr):
    bits = tl.where(order < 0, -order | _LOWEST_32, order)
    if HALF:
        return (bits >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return bits.to(tl.float32, bitcast=True)


@triton.jit
def _two_largest(x_RT, LOG_R: tl.constexpr, T: tl.constexpr):
    """Return the two largest values along R, which may be equal."""
    pair = tl.reshape(x_RT, [2, 1 << (LOG_R - 1), T])
    best = tl.max(pair, 0)
    second = tl.min(pair, 0)
    for i in tl.static_range(1, LOG_R):
        pair = tl.reshape(best, [2, 1 << (LOG_R - 1 - i), T])
        seconds = tl.max(tl.reshape(second, [2, 1 << (LOG_R - 1 - i), T]), 0)
        second = tl.maximum(tl.min(pair, 0), seconds)
        best = tl.max(pair, 0)
    return tl.reshape(best, [T]), tl.reshape(second, [T])


@triton.jit
def segment_words(
    peak_RT, has_nan_RT, HALF: tl.constexpr, WIDE: tl.constexpr, LOG_R: tl.constexpr, LOG_T: tl.constexpr
):
    """Return the word of each thread's segment (int64 if WIDE) from the chunks' largest values."""
    R: tl.constexpr = 1 << LOG_R
    T: tl.constexpr = 1 << LOG_T
    round_R1 = tl.arange(0, R)[:, None]
    order_RT = _order_of_finite(peak_RT, HALF)
    if WIDE:
        order_RT = tl.where(has_nan_RT, _NAN_ORDER, order_RT)
        best_T, second_T = _two_largest(order_RT, LOG_R, T)
        before_end_T = tl.max(tl.where(order_RT == best_T[None, :], R - 1 - round_R1, 0), 0)
        word_T = (best_T.to(tl.int64) << 32) + (before_end_T.to(tl.int64) << (32 - LOG_R))
        return word_T + ((second_T >> LOG_R) + (1 << (31 - LOG_R)))
    else:
        order_RT = tl.where(has_nan_RT, _NAN_ORDER & -65536, order_RT) + (R - 1 - round_R1)
        best_T, second_T = _two_largest(order_RT, LOG_R, T)
        word_T = (best_T & -65536) + ((best_T & (R - 1)) << (16 - LOG_R))
        return word_T + ((second_T >> (16 + LOG_R)) + (1 << (15 - LOG_R)))


@triton.jit
def _word_order(word, WIDE: tl.constexpr):
    return (word >> 32).to(tl.int32) if WIDE else word & -65536


@triton.jit
def _second_order(word, WIDE: tl.constexpr, LOG_R: tl.constexpr):
    """Return an upper bound of the order of all elements in the segment's other chunks."""
    HALF_WORD: tl.constexpr = 32 if WIDE else 16
    low = (word & ((1 << (HALF_WORD - LOG_R)) - 1)).to(tl.int32) - (1 << (HALF_WORD - 1 - LOG_R))
    return (low << (32 - HALF_WORD + LOG_R)) | ((1 << (32 - HALF_WORD + LOG_R)) - 1)


@triton.jit
def _segment_key(order, chunk, WIDE: tl.constexpr):
    """Return a key that sorts by value, then by the lower chunk."""
    if WIDE:
        return (order.to(tl.int64) << 20) + (0xFFFFF - chunk)
    else:
        return order + (0xFFFF - chunk)


@triton.jit
def _word_keys(word, at, WIDE: tl.constexpr, LOG_R: tl.constexpr, LOG_T: tl.constexpr):
    """Return the _segment_key of each word, given its place `at`."""
    R: tl.constexpr = 1 << LOG_R
    T: tl.constexpr = 1 << LOG_T
    HALF_WORD: tl.constexpr = 32 if WIDE else 16
    first_round = R - 1 - ((word >> (HALF_WORD - LOG_R)) & (R - 1)).to(tl.int32)
    chunk = (at // T * R + first_round) * T + at % T
    return _segment_key(_word_order(word, WIDE), chunk, WIDE)


@triton.jit
def _halved(low, high, middle, n, kappa):
    """Halve the search interval for a threshold that kappa keys reach. n keys reach `middle`."""
    high = tl.where(n > kappa, high, tl.where(n == kappa, middle, middle - 1))
    return tl.where(n >= kappa, middle, low), high


@triton.jit
def _reached_by(keys, kappa, low, high):
    """Return a threshold in [low, high] that kappa keys reach, more in a tie. kappa keys must reach low."""
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)  # the mean, rounded up, without overflow
        low, high = _halved(low, high, middle, tl.sum((keys >= middle).to(tl.int32), 0), kappa)
    return low


@triton.jit
def _scattered(N: tl.constexpr):
    """Return 0 to N - 1, but keep accesses unvectorized: each lane of the warp has every 32nd value."""
    return tl.max_contiguous(tl.arange(0, N), 1)


@triton.jit
def _reaching(
    words_ptr, start, least, KEYS: tl.constexpr, WIDE: tl.constexpr, LOG_R: tl.constexpr, LOG_T: tl.constexpr
):
    """Return the places of a block's words, and whether each word (or its key, if KEYS) reaches `least`."""
    at_T = start + _scattered(1 << LOG_T)
    word_T = tl.load(words_ptr + at_T)
    if KEYS:
        word_T = _word_keys(word_T, at_T, WIDE, LOG_R, LOG_T)
    return at_T, word_T >= least


@triton.jit
def _count(
    words_ptr, n_words, least, KEYS: tl.constexpr,
    WIDE: tl.constexpr, LOG_R: tl.constexpr, LOG_T: tl.constexpr,
):  # fmt: skip
    """Count how many of each thread's words reach `least`."""
    n_T = tl.zeros((1 << LOG_T,), tl.int32)
    for start in tl.range(0, n_words, 1 << LOG_T):
        n_T += _reaching(words_ptr, start, least, KEYS, WIDE, LOG_R, LOG_T)[1].to(tl.int32)
    return n_T


@triton.jit
def _list(
    words_ptr, list_ptr, n_words, least, n_T, KEYS: tl.constexpr,
    WIDE: tl.constexpr, LOG_R: tl.constexpr, LOG_T: tl.constexpr,
):  # fmt: skip
    """Write the places of the words that reach `least`. n_T is the result of _count."""
    slot_T = tl.cumsum(n_T, 0) - n_T
    for start in tl.range(0, n_words, 1 << LOG_T):
        at_T, hit_T = _reaching(words_ptr, start, least, KEYS, WIDE, LOG_R, LOG_T)
        tl.store(list_ptr + slot_T, at_T.to(list_ptr.dtype.element_ty), mask=hit_T)
        slot_T += hit_T.to(tl.int32)


@triton.jit
def _reached_in_memory(
    words_ptr, n_words, kappa, low, high, WIDE: tl.constexpr, LOG_R: tl.constexpr, LOG_T: tl.constexpr
):
    """Apply _reached_by to the keys of all segments."""
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)
        n = tl.sum(_count(words_ptr, n_words, middle, True, WIDE, LOG_R, LOG_T), 0)
        low, high = _halved(low, high, middle, n, kappa)
    return low


@triton.jit
def _best_segments(
    list_ptr, words_ptr, n_words, kappa,
    WIDE: tl.constexpr, LOG_K: tl.constexpr, LOG_L: tl.constexpr, LOG_R: tl.constexpr, LOG_T: tl.constexpr,
):  # fmt: skip
    """Return keys (K,). The first kappa are those of the best segments, in any order.

    The maxima of the T threads follow the words in memory.
    """
    order_T = _word_order(tl.load(words_ptr + n_words + _scattered(1 << LOG_T)), WIDE)
    if not WIDE:
        order_T >>= 16
    highest = tl.max(order_T, 0)
    least = _reached_by(order_T, kappa, tl.min(order_T, 0), highest)
    least = tl.min(tl.where(order_T >= least, order_T, highest), 0)
    if not WIDE:
        least <<= 16
        highest <<= 16
    low = _segment_key(least, 0xFFFFF if WIDE else 0xFFFF, WIDE)
    high = _segment_key(highest, 0, WIDE)
    least_word = least.to(tl.int64) << 32 if WIDE else least
    n_T = _count(words_ptr, n_words, least_word, False, WIDE, LOG_R, LOG_T)
    n_listed = tl.sum(n_T, 0)
    if n_listed > 1 << LOG_L:
        low = _reached_in_memory(words_ptr, n_words, kappa, low, high, WIDE, LOG_R, LOG_T)
        n_T = _count(words_ptr, n_words, low, True, WIDE, LOG_R, LOG_T)
        n_listed = tl.sum(n_T, 0)
        _list(words_ptr, list_ptr, n_words, low, n_T, True, WIDE, LOG_R, LOG_T)
    else:
        _list(words_ptr, list_ptr, n_words, least_word, n_T, False, WIDE, LOG_R, LOG_T)
    tl.debug_barrier()

    offs_l = _scattered(1 << LOG_L)
    live_L = offs_l < n_listed
    at_L = tl.load(list_ptr + offs_l, mask=live_L, other=0).to(tl.int32)
    key_L = _word_keys(tl.load(words_ptr + at_L), at_L, WIDE, LOG_R, LOG_T)
    key_L = tl.where(live_L, key_L, _LOWEST_64 if WIDE else _LOWEST_32)
    kept_L = key_L >= _reached_by(key_L, kappa, low, high)
    slot_L = tl.cumsum(kept_L.to(tl.int32), 0) - 1
    tl.debug_barrier()
    tl.store(list_ptr + slot_L, key_L, mask=kept_L)
    tl.debug_barrier()
    return tl.load(list_ptr + _scattered(1 << LOG_K))


@triton.jit
def _elements(row_ptr, chunks, offs_e, live, V, HALF: tl.constexpr):
    """Load order and id of the chunks' elements into a new last dimension. Missing elements rank lowest."""
    id_E = chunks[:, None] * offs_e.shape[0] + offs_e[None, :]
    inside = live[:, None] & (id_E < V)
    x_E = tl.load(row_ptr + id_E, mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, _order_of(x_E, HALF), _LOWEST_32), id_E


@triton.jit
def _best_of(order, ids):
    """Return the highest order, and the lowest id with this order."""
    best = tl.max(order, 0)
    return best, tl.min(tl.where(order == best, ids, _NO_ID), 0)


@triton.jit
def _best_elements(
    row_ptr, words_ptr, key_K, V, kappa, HALF: tl.constexpr, WIDE: tl.constexpr, LOG_K: tl.constexpr,
    LOG_R: tl.constexpr, LOG_T: tl.constexpr, LOG_E: tl.constexpr,
):  # fmt: skip
    """Return order and id, (K,) each, of the kappa best elements of these segments, unsorted."""
    R: tl.constexpr = 1 << LOG_R
    T: tl.constexpr = 1 << LOG_T
    E: tl.constexpr = 1 << LOG_E
    K: tl.constexpr = 1 << LOG_K
    CHUNKS: tl.constexpr = 0xFFFFF if WIDE else 0xFFFF
    offs_k = _scattered(K)
    live_K = offs_k < kappa
    chunk_K = tl.where(live_K, CHUNKS - (key_K & CHUNKS).to(tl.int32), 0)
    second_K = _second_order(tl.load(words_ptr + chunk_K // (R * T) * T + chunk_K % T), WIDE, LOG_R)
    offs_e = tl.arange(0, E)
    order_KE, _ = _elements(row_ptr, chunk_K, offs_e, live_K, V, HALF)
    order_K = tl.max(order_KE, 1)
    e_K = tl.min(tl.where(order_KE == order_K[:, None], offs_e[None, :], E), 1)
    second_K = tl.maximum(
        second_K, tl.max(tl.where(offs_e[None, :] == e_K[:, None], _LOWEST_32, order_KE), 1)
    )
    id_K = chunk_K * E + e_K

    # Bounds of each segment's other elements: the highest order, and the lowest id with this order.
    bound_K = tl.where(live_K, second_K, _LOWEST_32)
    bound_id_K = tl.where(live_K, 0, _NO_ID)
    last_order_K = order_K  # of each segment, the last element used
    last_id_K = id_K
    order_K = tl.where(live_K, order_K, _HIGHEST_32)  # padding is never the worst
    worst = tl.min(order_K, 0)
    worst_id = tl.max(tl.where(order_K == worst, id_K, -1), 0)
    bound, bound_id = _best_of(bound_K, bound_id_K)
    while (bound > worst) | ((bound == worst) & (bound_id < worst_id)):
        slot = tl.min(tl.where((bound_K == bound) & (bound_id_K == bound_id), offs_k, K), 0)
        at_slot_K = offs_k == slot
        last_order = tl.sum(tl.where(at_slot_K, last_order_K, 0), 0)
        last_id = tl.sum(tl.where(at_slot_K, last_id_K, 0), 0)
        chunk = tl.sum(tl.where(at_slot_K, chunk_K, 0), 0)
        chunk_R = chunk // (R * T) * (R * T) + chunk % T + tl.arange(0, R) * T
        order_RE, id_RE = _elements(row_ptr, chunk_R, _scattered(E), chunk_R >= 0, V, HALF)
        order_X = tl.reshape(order_RE, [R * E])
        id_X = tl.reshape(id_RE, [R * E])
        after_X = (order_X < last_order) | ((order_X == last_order) & (id_X > last_id))
        order_X = tl.where(after_X, order_X, _LOWEST_32)
        id_X = tl.where(order_X == _LOWEST_32, _NO_ID, id_X)
        best, best_id = _best_of(order_X, id_X)
        next_best, next_id = _best_of(tl.where(id_X == best_id, _LOWEST_32, order_X), id_X)
        last_order_K = tl.where(at_slot_K, best, last_order_K)
        last_id_K = tl.where(at_slot_K, best_id, last_id_K)
        bound_K = tl.where(at_slot_K, next_best, bound_K)
        bound_id_K = tl.where(at_slot_K, next_id, bound_id_K)
        if (best > worst) | ((best == worst) & (best_id < worst_id)):
            leaving_K = (order_K == worst) & (id_K == worst_id)
            order_K = tl.where(leaving_K, best, order_K)
            id_K = tl.where(leaving_K, best_id, id_K)
            worst = tl.min(order_K, 0)
            worst_id = tl.max(tl.where(order_K == worst, id_K, -1), 0)
        bound, bound_id = _best_of(bound_K, bound_id_K)
    return order_K, id_K


@triton.jit(do_not_specialize=["first_row", "kappa"])
def select_kernel(
    logits_ptr, stride_logits, words_ptr, stride_words, stats_ptr, ids_ptr, logps_ptr,
    first_row, V, temperature, kappa,
    LOG_K: tl.constexpr, LOG_L: tl.constexpr, HALF: tl.constexpr, WIDE: tl.constexpr,
    LOG_R: tl.constexpr, LOG_T: tl.constexpr, LOG_E: tl.constexpr,
):  # fmt: skip
    K: tl.constexpr = 1 << LOG_K
    local = tl.program_id(0).to(tl.int64)
    row = first_row + local
    row_ptr = logits_ptr + row * stride_logits
    list_ptr = words_ptr + local * stride_words
    words_ptr = list_ptr + (1 << LOG_L)
    n_words = tl.cdiv(V, 1 << (LOG_R + LOG_T + LOG_E)) << LOG_T
    key_K = _best_segments(list_ptr, words_ptr, n_words, kappa, WIDE, LOG_K, LOG_L, LOG_R, LOG_T)
    order_K, id_K = _best_elements(
        row_ptr, words_ptr, key_K, V, kappa, HALF, WIDE, LOG_K, LOG_R, LOG_T, LOG_E
    )
    live_K = _scattered(K) < kappa
    key_K = tl.where(live_K, (order_K.to(tl.int64) << 32) | (0x7FFFFFFF - id_K).to(tl.int64), _LOWEST_64)
    key_K = tl.reshape(largest(key_K, 0, LOG_K, LOG_K), [K])
    row_max = tl.load(stats_ptr + local * 2)
    log_sum = tl.load(stats_ptr + local * 2 + 1)
    offs_k = tl.arange(0, K)
    kept_K = offs_k < kappa
    x_K = _value_of((key_K >> 32).to(tl.int32), HALF)
    id_K = 0x7FFFFFFF - (key_K & 0x7FFFFFFF).to(tl.int32)
    tl.store(ids_ptr + row * kappa + offs_k, id_K, mask=kept_K)
    tl.store(logps_ptr + row * kappa + offs_k, (x_K - row_max) / temperature - log_sum, mask=kept_K)
