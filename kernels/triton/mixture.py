"""The teachers' mixture on the GPU: union, log alpha, merge of equal ids, the kappa best and their mass.

One launch. A program serves several rows where M * S is small. A candidate becomes one 64-bit key and keys
are sorted within registers. Pooled: by (log-probability, place in the pool). Merged: first by id, a segmented
scan adds equal ids in the log domain, then by (log-probability, lower id).

Shapes: N tokens, M teachers, S their support, P = M * S candidates, K = kappa slots of the result. In
kernels: B rows of a program; P and K padded to powers of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from smopd.kernels.types import Mixture

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_CANDIDATES = 1024
LOG_TILE = 9  # candidates of a program, as far as one row does not have more
MIN_LOG_P = 4  # fewer variants to compile
NO_REGISTER_TARGET = 255  # or ptxas spills a few bytes for one more warp on the processor

_LOWEST_32 = tl.constexpr(-(2**31))


@triton.jit
def ordered(x):
    """fp32 -> int32 in the same order; both zeros are one value, NaN is above +inf."""
    bits = x.to(tl.int32, bitcast=True)
    sign = bits >> 31
    return tl.where(x != x, 0x7FFFFFFF, ((bits & 0x7FFFFFFF) ^ sign) - sign)


@triton.jit
def unordered(order):
    """The fp32 value (of the two zeros +0) that ordered() was given."""
    bits = tl.where(order < 0, -order | _LOWEST_32, order)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _bit(N_DIMS: tl.constexpr, j: tl.constexpr):
    """0 and 1 along the j-th innermost of N_DIMS dimensions of size 2."""
    return tl.reshape(tl.arange(0, 2), [1] * (N_DIMS - j - 1) + [2] + [1] * j)


@triton.jit
def _compare_swap(cube, flip, j: tl.constexpr, N_DIMS: tl.constexpr):
    # a + b - a is exact in integers, and one shuffle where the two lie in different threads.
    other = tl.sum(cube, N_DIMS - 1 - j, keep_dims=True) - cube
    return tl.where((cube > other) != (flip ^ _bit(N_DIMS, j)), other, cube)


@triton.jit
def _bitonic_merge(cube, STAGE: tl.constexpr, ALTERNATE: tl.constexpr, N_DIMS: tl.constexpr):
    """Sorts the 2^STAGE innermost, each bitonic: descending, or alternating in direction."""
    flip = 1
    if ALTERNATE:
        flip = _bit(N_DIMS, STAGE)
    for i in tl.static_range(STAGE):
        cube = _compare_swap(cube, flip, STAGE - 1 - i, N_DIMS)
    return cube


@triton.jit
def largest(keys, LOG_ROWS: tl.constexpr, LOG_N: tl.constexpr, LOG_K: tl.constexpr):
    """The 2^LOG_K largest of each row of integer keys (2^LOG_ROWS, 2^LOG_N), descending.

    tl.topk would do, but takes the interpreter seconds.
    """
    cube = tl.reshape(keys, [2] * (LOG_ROWS + LOG_N))
    for i in tl.static_range(1, LOG_K + 1):
        cube = _bitonic_merge(cube, i, i < LOG_N, LOG_ROWS + LOG_N)
    for i in tl.static_range(LOG_N - LOG_K):
        # Two neighbouring runs, one descending and one ascending: the larger of each pair are the best.
        cube = tl.max(cube, LOG_ROWS + LOG_N - i - 1 - LOG_K)
        cube = _bitonic_merge(cube, LOG_K, i < LOG_N - LOG_K - 1, LOG_ROWS + LOG_N - i - 1)
    return tl.reshape(cube, [2**LOG_ROWS, 2**LOG_K])


# The (B, P) functions serve any kernel that holds the candidates of B rows.


@triton.jit
def load_candidates(
    ids_ptr, logps_ptr, log_alpha_ptr, rows_B, n_rows, n_support, n_pool,
    stride_ids_n, stride_ids_m, stride_ids_s, stride_logps_n, stride_logps_m, stride_logps_s,
    stride_alpha_n, stride_alpha_m, LOG_P: tl.constexpr,
):  # fmt: skip
    """ids (0 in an empty slot) and log alpha + log p (-inf in an empty slot), (B, 2^LOG_P) each."""
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
    ids_BP = tl.load(ids_ptr + at_BP, mask=live_BP & (logps_BP != -float("inf")), other=0).to(tl.int32)
    return ids_BP, logps_BP


@triton.jit
def _add_equal_ids(id_a, logp_a, id_b, logp_b):
    """Scan over sorted ids: the log-sum-exp of the run of b's id that ends at b."""
    high = tl.maximum(logp_a, logp_b)
    gap = tl.where(logp_a == logp_b, 0.0, -tl.abs(logp_a - logp_b))
    total = tl.where(gap == -float("inf"), high, high + tl.log(1.0 + tl.exp(gap)))
    return id_b, tl.where(id_a == id_b, total, logp_b)


@triton.jit
def merge_equal_ids(ids_BP, logps_BP, LOG_B: tl.constexpr, LOG_P: tl.constexpr):
    """Joins equal ids of a row by log-sum-exp. Each id stays in one slot; the others are 0, -inf."""
    lower_id_first = (0x7FFFFFFF - ids_BP).to(tl.int64) << 32
    keys_BP = largest(lower_id_first + (ordered(logps_BP).to(tl.int64) + 2147483648), LOG_B, LOG_P, LOG_P)
    ids_BP = 0x7FFFFFFF - (keys_BP >> 32).to(tl.int32)
    logps_BP = unordered(((keys_BP & 0xFFFFFFFF) - 2147483648).to(tl.int32))
    _, logps_BP = tl.associative_scan((ids_BP, logps_BP), 1, _add_equal_ids)
    offs_p = tl.arange(0, 1 << LOG_P)
    next_1P = tl.minimum(offs_p + 1, (1 << LOG_P) - 1)[None, :]
    next_ids_BP = tl.gather(ids_BP, tl.broadcast_to(next_1P, ids_BP.shape), 1)
    ends_run_BP = (ids_BP != next_ids_BP) | (offs_p == (1 << LOG_P) - 1)[None, :]
    return tl.where(ends_run_BP, ids_BP, 0), tl.where(ends_run_BP, logps_BP, -float("inf"))


@triton.jit
def best_merged(ids_BP, logps_BP, LOG_B: tl.constexpr, LOG_P: tl.constexpr, LOG_K: tl.constexpr):
    """ids and logps (B, 2^LOG_K) of the best of merge_equal_ids' slots; ties to the lower id."""
    keys_BP = (ordered(logps_BP).to(tl.int64) << 32) | (0x7FFFFFFF - ids_BP).to(tl.int64)
    best_BK = largest(keys_BP, LOG_B, LOG_P, LOG_K)
    return 0x7FFFFFFF - (best_BK & 0x7FFFFFFF).to(tl.int32), unordered((best_BK >> 32).to(tl.int32))


@triton.jit
def best_pooled(logps_BP, LOG_B: tl.constexpr, LOG_P: tl.constexpr, LOG_K: tl.constexpr):
    """Places in the pool and logps (B, 2^LOG_K) of the best candidates; ties to the lower place."""
    place_1P = tl.arange(0, 1 << LOG_P)[None, :]
    keys_BP = (ordered(logps_BP).to(tl.int64) << 32) | (0x7FFFFFFF - place_1P).to(tl.int64)
    best_BK = largest(keys_BP, LOG_B, LOG_P, LOG_K)
    return 0x7FFFFFFF - (best_BK & 0x7FFFFFFF).to(tl.int32), unordered((best_BK >> 32).to(tl.int32))


@triton.jit(do_not_specialize=["n_rows"])
def _mixture_kernel(
    ids_ptr, logps_ptr, log_alpha_ptr, out_ids_ptr, out_logps_ptr, mass_ptr,
    n_rows, n_support, n_pool, kappa,
    stride_ids_n, stride_ids_m, stride_ids_s, stride_logps_n, stride_logps_m, stride_logps_s,
    stride_alpha_n, stride_alpha_m,
    MERGE: tl.constexpr, LOG_B: tl.constexpr, LOG_P: tl.constexpr, LOG_K: tl.constexpr,
):  # fmt: skip
    B: tl.constexpr = 1 << LOG_B
    K: tl.constexpr = 1 << LOG_K
    rows_B = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    ids_BP, logps_BP = load_candidates(
        ids_ptr, logps_ptr, log_alpha_ptr, rows_B, n_rows, n_support, n_pool,
        stride_ids_n, stride_ids_m, stride_ids_s, stride_logps_n, stride_logps_m, stride_logps_s,
        stride_alpha_n, stride_alpha_m, LOG_P,
    )  # fmt: skip
    rows_B1 = rows_B[:, None]
    if MERGE:
        ids_BP, logps_BP = merge_equal_ids(ids_BP, logps_BP, LOG_B, LOG_P)
        ids_BK, logps_BK = best_merged(ids_BP, logps_BP, LOG_B, LOG_P, LOG_K)
    else:
        place_BK, logps_BK = best_pooled(logps_BP, LOG_B, LOG_P, LOG_K)
        at_BK = rows_B1 * stride_ids_n + (place_BK // n_support).to(tl.int64) * stride_ids_m
        at_BK += (place_BK % n_support).to(tl.int64) * stride_ids_s
        live_BK = (rows_B1 < n_rows) & (place_BK < n_pool)
        ids_BK = tl.load(ids_ptr + at_BK, mask=live_BK, other=0).to(tl.int32)
    ids_BK = tl.where(logps_BK == -float("inf"), 0, ids_BK)
    offs_k = tl.arange(0, K)
    kept_BK = (rows_B1 < n_rows) & (offs_k < kappa)[None, :]
    at_BK = rows_B1 * kappa + offs_k[None, :]
    tl.store(out_ids_ptr + at_BK, ids_BK, mask=kept_BK)
    tl.store(out_logps_ptr + at_BK, logps_BK, mask=kept_BK)
    mass_B = tl.sum(tl.where((offs_k < kappa)[None, :], tl.exp(logps_BK), 0.0), 1)
    tl.store(mass_ptr + rows_B, mass_B, mask=rows_B < n_rows)
    for start in range(K, kappa, K):  # kappa above the number of candidates: empty slots
        kept_BK = (rows_B1 < n_rows) & (start + offs_k < kappa)[None, :]
        tl.store(out_ids_ptr + at_BK + start, tl.zeros((B, K), tl.int32), mask=kept_BK)
        tl.store(out_logps_ptr + at_BK + start, tl.full((B, K), -float("inf"), tl.float32), mask=kept_BK)


def unserved(op: str, tensor: Tensor, *, n_pooled: int) -> str | None:
    """Why M * S = n_pooled candidates are not served; None: they are. tensor: their log-probabilities."""
    if tensor.dtype not in DTYPES:
        return f"the dtype of the log-probabilities is {tensor.dtype}, expected one of {DTYPES}"
    if n_pooled > MAX_CANDIDATES:
        return f"M * S is {n_pooled}, expected at most {MAX_CANDIDATES}"
    return None


def teacher_mixture(
    ids_NMS: Tensor, logps_NMS: Tensor, log_alpha: Tensor, kappa: int, *, merge: bool = False
) -> Mixture:
    why_not = unserved("teacher_mixture", logps_NMS, n_pooled=ids_NMS.shape[1] * ids_NMS.shape[2])
    if why_not is not None:
        raise ValueError(f"teacher_mixture: {why_not}")
    n_rows, n_teachers, n_support = ids_NMS.shape
    n_pool, device = n_teachers * n_support, ids_NMS.device
    if n_rows == 0 or kappa == 0 or n_pool == 0:
        ids_NS = torch.zeros(n_rows, kappa, dtype=torch.int32, device=device)
        logps_NS = torch.full((n_rows, kappa), -torch.inf, dtype=torch.float32, device=device)
        return Mixture(ids_NS, logps_NS, torch.zeros(n_rows, dtype=torch.float32, device=device))
    ids_NS = torch.empty(n_rows, kappa, dtype=torch.int32, device=device)
    logps_NS = torch.empty(n_rows, kappa, dtype=torch.float32, device=device)
    mass_N = torch.empty(n_rows, dtype=torch.float32, device=device)
    log_alpha_NM = log_alpha.expand(n_rows, n_teachers)
    log_p = max((n_pool - 1).bit_length(), MIN_LOG_P)
    log_b = max(LOG_TILE - log_p, 0)
    _mixture_kernel[(triton.cdiv(n_rows, 1 << log_b),)](
        ids_NMS, logps_NMS, log_alpha_NM, ids_NS, logps_NS, mass_N,
        n_rows, n_support, n_pool, kappa,
        *ids_NMS.stride(), *logps_NMS.stride(), *log_alpha_NM.stride(),
        MERGE=merge, LOG_B=log_b, LOG_P=log_p, LOG_K=min(max((kappa - 1).bit_length(), MIN_LOG_P), log_p),
        num_warps=4, num_stages=1, maxnreg=NO_REGISTER_TARGET,
    )  # fmt: skip
    return Mixture(ids_NS, logps_NS, mass_N)
