"""The mixture kernel adds log alpha, merges equal ids, keeps the kappa best candidates and sums their mass.

It sorts 64-bit keys in registers, mostly those of one warp. With MERGE, all candidates are first sorted by
id. Without MERGE, each teacher's list is combined with the best candidates so far. Sums have a fixed order,
so results do not depend on the compiler's layout.

Shapes: N tokens, M teachers, S entries per teacher, P = M * S candidates, K = kappa slots of the result, B
rows of a program. In kernels, P and K are padded to powers of two. Without MERGE, K is at least S.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from smopd.kernels.types import Mixture

MAX_CANDIDATES = 1024
LOG_TILE = {False: 7, True: 8}  # log2 of the slots of a program, by `merge`, unless one row needs more
LOG_WARP = 8  # log2 of a warp's slots. Sorts of rows up to this size need no shared memory
MIN_LOG_P = 4  # so that fewer variants are compiled
NO_REGISTER_TARGET = 255  # without this, ptxas spills a few bytes to fit one more warp

_LOWEST_32 = tl.constexpr(-(2**31))
_LOWEST_64 = tl.constexpr(-(2**63))


@triton.jit
def ordered(x):
    """Map fp32 to int32 in the same order. -0 equals +0, and NaN is above +inf."""
    bits = x.to(tl.int32, bitcast=True)
    sign = bits >> 31
    return tl.where(x != x, 0x7FFFFFFF, ((bits & 0x7FFFFFFF) ^ sign) - sign)


@triton.jit
def unordered(order):
    """Invert ordered()."""
    bits = tl.where(order < 0, -order | _LOWEST_32, order)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _bit(N_DIMS: tl.constexpr, j: tl.constexpr):
    """Return 0 and 1 along the j-th innermost of N_DIMS dimensions of size 2."""
    return tl.reshape(tl.arange(0, 2), [1] * (N_DIMS - j - 1) + [2] + [1] * j)


@triton.jit
def _compare_swap(cube, flip, j: tl.constexpr, N_DIMS: tl.constexpr):
    # a + b - a is exact for integers and needs one shuffle between threads.
    other = tl.sum(cube, N_DIMS - 1 - j, keep_dims=True) - cube
    return tl.where((cube > other) != (flip ^ _bit(N_DIMS, j)), other, cube)


@triton.jit
def _bitonic_merge(cube, STAGE: tl.constexpr, ALTERNATE: tl.constexpr, N_DIMS: tl.constexpr):
    """Sort bitonic runs of 2^STAGE keys: all in descending order or, if ALTERNATE, in alternating order."""
    flip = 1
    if ALTERNATE:
        flip = _bit(N_DIMS, STAGE)
    for i in tl.static_range(STAGE):
        cube = _compare_swap(cube, flip, STAGE - 1 - i, N_DIMS)
    return cube


@triton.jit
def largest(keys, LOG_ROWS: tl.constexpr, LOG_N: tl.constexpr, LOG_K: tl.constexpr):
    """Return the 2^LOG_K largest keys of each row in descending order. keys: integers (2^LOG_ROWS, 2^LOG_N).

    tl.topk is not used, because it takes seconds in the interpreter.
    """
    cube = tl.reshape(keys, [2] * (LOG_ROWS + LOG_N))
    for i in tl.static_range(1, LOG_K + 1):
        cube = _bitonic_merge(cube, i, i < LOG_N, LOG_ROWS + LOG_N)
    for i in tl.static_range(LOG_N - LOG_K):
        # The pairwise maxima of a descending and an ascending run are the best keys of both.
        cube = tl.max(cube, LOG_ROWS + LOG_N - i - 1 - LOG_K)
        cube = _bitonic_merge(cube, LOG_K, i < LOG_N - LOG_K - 1, LOG_ROWS + LOG_N - i - 1)
    return tl.reshape(cube, [2**LOG_ROWS, 2**LOG_K])


@triton.jit
def tree_sum(x, ROWS: tl.constexpr, LOG_N: tl.constexpr):
    """Sum each row of (ROWS, 2^LOG_N) pairwise, so that the bits do not depend on the layout."""
    cube = tl.reshape(x, [ROWS] + [2] * LOG_N)
    for i in tl.static_range(LOG_N):
        cube = tl.sum(cube, LOG_N - i)
    return cube


@triton.jit
def as_int32(ids):
    """Convert ids to int32. An id that does not fit becomes -1."""
    return tl.where(ids.to(tl.int32) == ids, ids.to(tl.int32), -1)


@triton.jit
def load_candidates(
    ids_ptr, logps_ptr, log_alpha_ptr, rows_B, n_rows, n_support, n_pool,
    stride_ids_n, stride_ids_m, stride_ids_s, stride_logps_n, stride_logps_m, stride_logps_s,
    stride_alpha_n, stride_alpha_m, LOG_P: tl.constexpr,
):  # fmt: skip
    """Load ids (0 in an empty slot) and log alpha + log p (-inf in an empty slot), (B, 2^LOG_P) each."""
    offs_p = tl.arange(0, 1 << LOG_P)
    m_1P = (offs_p // n_support).to(tl.int64)[None, :]
    s_1P = (offs_p % n_support).to(tl.int64)[None, :]
    rows_B1 = rows_B[:, None]
    live_BP = (rows_B1 < n_rows) & (offs_p < n_pool)[None, :]
    at_BP = rows_B1 * stride_logps_n + m_1P * stride_logps_m + s_1P * stride_logps_s
    logps_BP = tl.load(logps_ptr + at_BP, mask=live_BP, other=-float("inf")).to(tl.float32)
    at_BP = rows_B1 * stride_alpha_n + m_1P * stride_alpha_m
    logps_BP += tl.load(log_alpha_ptr + at_BP, mask=live_BP, other=0.0).to(tl.float32)
    at_BP = rows_B1 * stride_ids_n + m_1P * stride_ids_m + s_1P * stride_ids_s
    ids_BP = tl.load(ids_ptr + at_BP, mask=live_BP & (logps_BP != -float("inf")), other=0)
    return as_int32(ids_BP), logps_BP


@triton.jit
def log_add(x, y):
    """Return log(exp(x) + exp(y)). This is exact if x or y is -inf."""
    gap = tl.where(x == y, 0.0, -tl.abs(x - y))
    high = tl.maximum(x, y)
    return tl.where(gap == -float("inf"), high, high + tl.log(1.0 + tl.exp(gap)))


@triton.jit
def _ahead(ids_BP, logps_BP, reach):
    """Return the values `reach` slots ahead, and whether these slots have the same id and are not empty."""
    P: tl.constexpr = ids_BP.shape[1]
    there_BP = tl.broadcast_to(tl.arange(0, P)[None, :] + reach, ids_BP.shape)
    at_BP = tl.minimum(there_BP, P - 1)
    after_BP = tl.gather(logps_BP, at_BP, 1)
    same_BP = (tl.gather(ids_BP, at_BP, 1) == ids_BP) & (there_BP < P)
    return after_BP, same_BP & (after_BP != -float("inf"))


@triton.jit
def merge_equal_ids(ids_BP, logps_BP, LOG_B: tl.constexpr, LOG_P: tl.constexpr):
    """Merge equal ids of a row by logsumexp, each id in one slot. The other slots become id 0, logp -inf."""
    lower_id_first = (0x7FFFFFFF - ids_BP).to(tl.int64) << 32
    keys_BP = largest(lower_id_first + (ordered(logps_BP).to(tl.int64) + 2147483648), LOG_B, LOG_P, LOG_P)
    ids_BP = 0x7FFFFFFF - (keys_BP >> 32).to(tl.int32)
    logps_BP = unordered(((keys_BP & 0xFFFFFFFF) - 2147483648).to(tl.int32))
    # Each slot is the sum of `reach` slots of its id, from itself on. The empty slots of an id come last.
    reach = 1
    after_BP, same_BP = _ahead(ids_BP, logps_BP, reach)
    while tl.max(tl.max(same_BP.to(tl.int32), 1), 0) > 0:
        logps_BP = tl.where(same_BP, log_add(logps_BP, after_BP), logps_BP)
        reach *= 2
        after_BP, same_BP = _ahead(ids_BP, logps_BP, reach)
    offs_BP = tl.broadcast_to(tl.arange(0, 1 << LOG_P)[None, :], ids_BP.shape)
    first_BP = (tl.gather(ids_BP, tl.maximum(offs_BP - 1, 0), 1) != ids_BP) | (offs_BP == 0)
    return tl.where(first_BP, ids_BP, 0), tl.where(first_BP, logps_BP, -float("inf"))


@triton.jit
def best_merged(ids_BP, logps_BP, LOG_B: tl.constexpr, LOG_P: tl.constexpr, LOG_K: tl.constexpr):
    """Return ids and logps (B, 2^LOG_K) of the best slots of merge_equal_ids. Ties go to the lower id."""
    keys_BP = (ordered(logps_BP).to(tl.int64) << 32) | (0x7FFFFFFF - ids_BP.to(tl.int64))
    best_BK = largest(keys_BP, LOG_B, LOG_P, LOG_K)
    return (0x7FFFFFFF - (best_BK & 0xFFFFFFFF)).to(tl.int32), unordered((best_BK >> 32).to(tl.int32))


@triton.jit
def _best_pooled(
    ids_ptr, logps_ptr, log_alpha_ptr, rows_B, n_rows, n_support, n_teachers,
    stride_ids_n, stride_ids_m, stride_ids_s, stride_logps_n, stride_logps_m, stride_logps_s,
    stride_alpha_n, stride_alpha_m, LOG_B: tl.constexpr, LOG_K: tl.constexpr,
):  # fmt: skip
    """Return ids and logps (B, 2^LOG_K) of the best candidates.

    Ties go to the lower teacher, then to its earlier entry. A list is sorted only if it does not descend. The
    best candidates so far are kept in ascending order. Their pairwise maxima with a descending list are the
    best of both, in bitonic order.
    """
    K: tl.constexpr = 1 << LOG_K
    rows_B1 = rows_B[:, None]
    offs_1K = tl.arange(0, K)[None, :]
    live_BK = (rows_B1 < n_rows) & (offs_1K < n_support)
    has_next_BK = (rows_B1 < n_rows) & (offs_1K + 1 < n_support)
    logps_at_BK = logps_ptr + rows_B1 * stride_logps_n + offs_1K.to(tl.int64) * stride_logps_s
    best_BK = tl.full(live_BK.shape, _LOWEST_64, tl.int64)
    log_alpha_at_B1 = log_alpha_ptr + rows_B1 * stride_alpha_n
    for m in range(n_teachers):
        log_alpha_B1 = tl.load(log_alpha_at_B1, mask=rows_B1 < n_rows, other=0.0).to(tl.float32)
        logps_BK = tl.load(logps_at_BK, mask=live_BK, other=-float("inf")).to(tl.float32)
        logps_BK = tl.where(live_BK, logps_BK + log_alpha_B1, -float("inf"))  # log alpha may be inf or NaN
        next_BK = tl.load(logps_at_BK + stride_logps_s, mask=has_next_BK, other=-float("inf"))
        falls_BK = (logps_BK >= next_BK.to(tl.float32) + log_alpha_B1) | (offs_1K + 1 >= n_support)
        keys_BK = (ordered(logps_BK).to(tl.int64) << 32) | (0x7FFFFFFF - (m * K + offs_1K)).to(tl.int64)
        if tl.min(tl.min(falls_BK.to(tl.int32), 1), 0) == 0:
            keys_BK = largest(keys_BK, LOG_B, LOG_K, LOG_K)
        cube = tl.reshape(tl.maximum(best_BK, keys_BK), [2] * (LOG_B + LOG_K))
        falling = tl.where(m + 1 == n_teachers, 1, 0)
        for i in tl.static_range(LOG_K):
            cube = _compare_swap(cube, falling, LOG_K - 1 - i, LOG_B + LOG_K)
        best_BK = tl.reshape(cube, [1 << LOG_B, K])
        logps_at_BK += stride_logps_m
        log_alpha_at_B1 += stride_alpha_m
    place_BK = 0x7FFFFFFF - (best_BK & 0x7FFFFFFF).to(tl.int32)
    logps_BK = unordered((best_BK >> 32).to(tl.int32))
    at_BK = rows_B1 * stride_ids_n + (place_BK >> LOG_K).to(tl.int64) * stride_ids_m
    at_BK += (place_BK & (K - 1)).to(tl.int64) * stride_ids_s
    return as_int32(tl.load(ids_ptr + at_BK, mask=logps_BK != -float("inf"), other=0)), logps_BK


@triton.jit(do_not_specialize=["n_rows"])
def _mixture_kernel(
    ids_ptr, logps_ptr, log_alpha_ptr, out_ids_ptr, out_logps_ptr, mass_ptr,
    n_rows, n_teachers, n_support, kappa,
    stride_ids_n, stride_ids_m, stride_ids_s, stride_logps_n, stride_logps_m, stride_logps_s,
    stride_alpha_n, stride_alpha_m,
    MERGE: tl.constexpr, LOG_B: tl.constexpr, LOG_P: tl.constexpr, LOG_K: tl.constexpr,
):  # fmt: skip
    B: tl.constexpr = 1 << LOG_B
    K: tl.constexpr = 1 << LOG_K
    rows_B = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    if MERGE:
        ids_BP, logps_BP = load_candidates(
            ids_ptr, logps_ptr, log_alpha_ptr, rows_B, n_rows, n_support, n_teachers * n_support,
            stride_ids_n, stride_ids_m, stride_ids_s, stride_logps_n, stride_logps_m, stride_logps_s,
            stride_alpha_n, stride_alpha_m, LOG_P,
        )  # fmt: skip
        ids_BP, logps_BP = merge_equal_ids(ids_BP, logps_BP, LOG_B, LOG_P)
        ids_BK, logps_BK = best_merged(ids_BP, logps_BP, LOG_B, LOG_P, LOG_K)
        ids_BK = tl.where(logps_BK == -float("inf"), 0, ids_BK)
    else:
        ids_BK, logps_BK = _best_pooled(
            ids_ptr, logps_ptr, log_alpha_ptr, rows_B, n_rows, n_support, n_teachers,
            stride_ids_n, stride_ids_m, stride_ids_s, stride_logps_n, stride_logps_m, stride_logps_s,
            stride_alpha_n, stride_alpha_m, LOG_B, LOG_K,
        )  # fmt: skip
    rows_B1 = rows_B[:, None]
    offs_k = tl.arange(0, K)
    kept_BK = (rows_B1 < n_rows) & (offs_k < kappa)[None, :]
    at_BK = rows_B1 * kappa + offs_k[None, :]
    tl.store(out_ids_ptr + at_BK, ids_BK, mask=kept_BK)
    tl.store(out_logps_ptr + at_BK, logps_BK, mask=kept_BK)
    mass_B = tree_sum(tl.where((offs_k < kappa)[None, :], tl.exp(logps_BK), 0.0), B, LOG_K)
    tl.store(mass_ptr + rows_B, mass_B, mask=rows_B < n_rows)
    for start in range(K, kappa, K):  # kappa exceeds the number of candidates, so the rest is empty
        kept_BK = (rows_B1 < n_rows) & (start + offs_k < kappa)[None, :]
        tl.store(out_ids_ptr + at_BK + start, tl.zeros((B, K), tl.int32), mask=kept_BK)
        tl.store(out_logps_ptr + at_BK + start, tl.full((B, K), -float("inf"), tl.float32), mask=kept_BK)


def unserved(op: str, tensor: Tensor, *, n_pooled: int) -> str | None:
    """Return why a mixture of n_pooled = M * S candidates cannot be computed here, or None."""
    return None if n_pooled <= MAX_CANDIDATES else f"M * S is {n_pooled}, expected at most {MAX_CANDIDATES}"


def teacher_mixture(
    ids_NMS: Tensor, logps_NMS: Tensor, log_alpha: Tensor, kappa: int, *, merge: bool = False
) -> Mixture:
    n_rows, n_teachers, n_support = ids_NMS.shape
    n_pool = n_teachers * n_support
    device, none = ids_NMS.device, n_rows == 0 or kappa == 0 or n_pool == 0
    make = torch.zeros if none else torch.empty
    ids_NS = make(n_rows, kappa, dtype=torch.int32, device=device)
    logps_NS = make(n_rows, kappa, dtype=torch.float32, device=device)
    mixture = Mixture(ids_NS, logps_NS, make(n_rows, dtype=torch.float32, device=device))
    if none:
        mixture.logps_NS.fill_(-torch.inf)
        return mixture
    log_alpha_NM = log_alpha.expand(n_rows, n_teachers)
    log_p = max((n_pool - 1).bit_length(), MIN_LOG_P)
    log_k = min(max((kappa - 1).bit_length(), MIN_LOG_P), log_p)
    if merge:
        log_tile = log_p
    else:
        log_tile = log_k = max(log_k, (n_support - 1).bit_length())
    log_b = max(LOG_TILE[merge] - log_tile, 0)
    _mixture_kernel[(triton.cdiv(n_rows, 1 << log_b),)](
        ids_NMS, logps_NMS, log_alpha_NM, mixture.ids_NS, mixture.logps_NS, mixture.mass_N,
        n_rows, n_teachers, n_support, kappa,
        *ids_NMS.stride(), *logps_NMS.stride(), *log_alpha_NM.stride(),
        MERGE=merge, LOG_B=log_b, LOG_P=log_tile, LOG_K=log_k,
        num_warps=max(1 << log_tile >> LOG_WARP, 1), num_stages=1, maxnreg=NO_REGISTER_TARGET,
        enable_fp_fusion=True,
    )  # fmt: skip
    return mixture
