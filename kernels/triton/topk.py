"""Top-kappa with log-probabilities: one kernel streams the vocabulary, and a second one selects (select.py).

In the first kernel, each thread keeps its maximum and its sum of exponentials, and stores a word for each
block (64 bits for fp32 logits, else 32). The loop over blocks needs no communication between threads.

Shapes: N rows, V vocabulary, S support entries (kappa). In kernels: R rounds of a block, T threads, E
elements of a chunk (16 bytes, read at once). Chunk c holds the ids c * E to c * E + E - 1.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from smopd.kernels.triton.select import listed_log, segment_words, select_kernel
from smopd.kernels.types import TopK

MAX_KAPPA = 128
MAX_VOCAB = 1 << 19  # a 32-bit key has 16 bits for a chunk's number, and the chunk has 8 elements
SCRATCH_BYTES = 64 << 20  # for the words between the two kernels. More rows need more launches
LOG_THREADS = 7  # log2 of the threads of the stream kernel
LOG_SLOTS = 4  # kappa is padded to at least 2^4, so that fewer variants are compiled

_LOWEST_32 = tl.constexpr(-(2**31))
_LOWEST_64 = tl.constexpr(-(2**63))
_LOG2_E = tl.constexpr(math.log2(math.e))
_FAR = tl.constexpr(2.0**100)  # upper limit of maxima, so that offsets stay finite
_LOW = tl.constexpr(-(2.0**30))  # lower limit of maxima: rounding larger products could give infinite powers
_COARSE = tl.constexpr(2.0**23)  # fp32 rounds larger offsets to integers, so such rows are summed again


@triton.jit
def _halving_sum(x, LOG_N: tl.constexpr, AXIS: tl.constexpr):
    """Sum over the LOG_N dimensions of size 2 from AXIS on, in a fixed order."""
    for i in tl.static_range(LOG_N):
        x = tl.sum(x, AXIS + LOG_N - 1 - i)
    return x


@triton.jit
def _scaled_shift(max_T, scale):
    """Return the offset of the exponents for this maximum. It is finite, so that masked elements add 0.

    The fma with 0 rounds the product. The compiler could fuse a plain product into a difference without
    rounding. The offset minus itself would then not be 0.
    """
    return tl.fma(tl.clamp(max_T, _LOW, _FAR), scale, 0.0)


@triton.jit
def _segment(
    x_RTE, max_T, sum_T, best_T, scale,
    WORDS: tl.constexpr, HALF: tl.constexpr, WIDE: tl.constexpr,
    LOG_R: tl.constexpr, LOG_T: tl.constexpr, LOG_E: tl.constexpr,
):  # fmt: skip
    """Add a block to the threads' statistics. Return them and the threads' words of this block."""
    R: tl.constexpr = 1 << LOG_R
    T: tl.constexpr = 1 << LOG_T
    peak_RT = tl.max(x_RTE, 2)
    new_max_T = tl.maximum(max_T, tl.max(peak_RT, 0))
    shift_T = _scaled_shift(new_max_T, scale)
    e_RTE = tl.exp2(tl.fma(x_RTE, scale, -shift_T[None, :, None]))
    mass_RT = _halving_sum(tl.reshape(e_RTE, [R, T] + [2] * LOG_E), LOG_E, 2)
    new_sum_T = _halving_sum(tl.reshape(mass_RT, [2] * LOG_R + [T]), LOG_R, 0)
    sum_T = tl.fma(sum_T, tl.exp2(_scaled_shift(max_T, scale) - shift_T), new_sum_T)
    word_T = best_T
    if WORDS:
        # The maximum ignores NaN, but the sum does not.
        word_T = segment_words(peak_RT, mass_RT != mass_RT, HALF, WIDE, LOG_R, LOG_T)
        best_T = tl.maximum(best_T, word_T)
    return new_max_T, sum_T, best_T, word_T


@triton.jit
def _log_sum(row_ptr, V, max_T, sum_T, scale, LOG_T: tl.constexpr, BLOCK: tl.constexpr):
    """Return the row's maximum and the log of its sum of exp((x - maximum) / temperature).

    The threads sum 2^(x scale - shift). Because of rounding, the maximum's own summand is 2^residual instead
    of 1. The sum is corrected, so that its log is 0 in a row with a single finite logit.
    """
    row_max = tl.max(max_T, 0)
    shift = _scaled_shift(row_max, scale)
    sum_T *= tl.exp2(_scaled_shift(max_T, scale) - shift)
    residual = tl.fma(row_max, scale, -shift)
    if (tl.abs(shift) >= _COARSE) | (tl.abs(row_max) >= _FAR):  # infinite, or needs the second pass
        residual = 0.0
        if tl.abs(row_max) < float("inf"):
            sum_T = tl.zeros_like(sum_T)
            for start in tl.range(0, V, BLOCK, num_stages=1):
                offs_v = start + tl.arange(0, BLOCK)
                x = tl.load(row_ptr + offs_v, mask=offs_v < V, other=-float("inf")).to(tl.float32)
                e = tl.exp2((x - row_max) * scale)
                sum_T += tl.sum(tl.reshape(e, (1 << LOG_T, BLOCK >> LOG_T)), 1)
    total = _halving_sum(tl.reshape(sum_T, [2] * LOG_T), LOG_T, 0)
    total = tl.fma(total - tl.exp2(residual), tl.exp2(-residual), 1.0)
    return row_max, tl.log2(total) / _LOG2_E


@triton.jit(do_not_specialize=["first_row"])
def _stream_kernel(
    logits_ptr, stride_logits, token_ids_ptr, stride_token_ids, words_ptr, stride_words, stats_ptr,
    token_logp_ptr, first_row, V, scale, temperature,
    HAS_TOKENS: tl.constexpr, WORDS: tl.constexpr, HALF: tl.constexpr, WIDE: tl.constexpr,
    LOG_R: tl.constexpr, LOG_T: tl.constexpr, LOG_E: tl.constexpr,
):  # fmt: skip
    R: tl.constexpr = 1 << LOG_R
    T: tl.constexpr = 1 << LOG_T
    E: tl.constexpr = 1 << LOG_E
    BLOCK: tl.constexpr = R * T * E
    local = tl.program_id(0).to(tl.int64)
    row = first_row + local
    row_ptr = logits_ptr + row * stride_logits
    offs_t = tl.arange(0, T)
    block_words_ptr = words_ptr + local * stride_words + offs_t
    max_T = tl.full((T,), -float("inf"), tl.float32)
    sum_T = tl.zeros((T,), tl.float32)
    if WIDE:
        best_T = tl.full((T,), _LOWEST_64, tl.int64)
    else:
        best_T = tl.full((T,), _LOWEST_32, tl.int32)
    n_full = V // BLOCK
    for j in tl.range(0, n_full, num_stages=1):
        x = tl.load(row_ptr + j * BLOCK + tl.arange(0, BLOCK), eviction_policy="evict_first")
        x_RTE = tl.reshape(x.to(tl.float32), (R, T, E))
        max_T, sum_T, best_T, word_T = _segment(
            x_RTE, max_T, sum_T, best_T, scale, WORDS, HALF, WIDE, LOG_R, LOG_T, LOG_E
        )
        if WORDS:
            tl.store(block_words_ptr, word_T)
            block_words_ptr += T
    if n_full * BLOCK < V:
        offs_v = n_full * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + offs_v, mask=offs_v < V, other=-float("inf"), eviction_policy="evict_first")
        x_RTE = tl.reshape(x.to(tl.float32), (R, T, E))
        max_T, sum_T, best_T, word_T = _segment(
            x_RTE, max_T, sum_T, best_T, scale, WORDS, HALF, WIDE, LOG_R, LOG_T, LOG_E
        )
        if WORDS:
            tl.store(block_words_ptr, word_T)
            block_words_ptr += T
    row_max, log_sum = _log_sum(row_ptr, V, max_T, sum_T, scale, LOG_T, T * E)
    if WORDS:
        tl.store(block_words_ptr, best_T)
        tl.store(stats_ptr + local * 2, row_max)
        tl.store(stats_ptr + local * 2 + 1, log_sum)
    if HAS_TOKENS:
        token = tl.load(token_ids_ptr + row * stride_token_ids)
        inside = (token >= 0) & (token < V)
        x = tl.load(row_ptr + token, mask=inside, other=float("nan")).to(tl.float32)
        tl.store(token_logp_ptr + row, (x - row_max) / temperature - log_sum)


def unserved(op: str, tensor: Tensor, *, kappa: int, n_vocab: int | None = None) -> str | None:
    """Return why this backend rejects the call, or None. n_vocab is given if `tensor` is not the logits."""
    n_vocab = tensor.shape[-1] if n_vocab is None else n_vocab
    if kappa > MAX_KAPPA:
        return f"kappa is {kappa}, expected at most {MAX_KAPPA}"
    if n_vocab > MAX_VOCAB:
        return f"V is {n_vocab}, expected at most {MAX_VOCAB}"
    return None


def topk_logprobs(
    logits_NV: Tensor, kappa: int, *, token_ids_N: Tensor | None = None, temperature: float = 1.0
) -> TopK:
    (n_rows, n_vocab), device = logits_NV.shape, logits_NV.device
    ids_NS = torch.empty(n_rows, kappa, dtype=torch.int32, device=device)
    logps_NS = torch.empty(n_rows, kappa, dtype=torch.float32, device=device)
    token_logp_N = None if token_ids_N is None else torch.empty(n_rows, dtype=torch.float32, device=device)
    if n_rows == 0 or (kappa == 0 and token_ids_N is None):
        return TopK(ids_NS, logps_NS, token_logp_N)

    log_r, log_e = (4, 2) if logits_NV.dtype == torch.float32 else (3, 3)
    block = 1 << (log_r + LOG_THREADS + log_e)
    n_blocks = triton.cdiv(n_vocab, block)
    wide = logits_NV.dtype == torch.float32
    word_type = torch.int64 if wide else torch.int32
    log_k = max((kappa - 1).bit_length(), LOG_SLOTS)
    log_l = listed_log(log_k)
    row_words = ((n_blocks + 1) << LOG_THREADS) + (1 << log_l)
    n_launches = triton.cdiv(n_rows * row_words * word_type.itemsize, SCRATCH_BYTES) if kappa else 1
    rows = triton.cdiv(n_rows, n_launches)
    words = torch.empty(rows * row_words if kappa else 1, dtype=word_type, device=device)
    stats = torch.empty(2 * rows, dtype=torch.float32, device=device)
    rows_NV = (logits_NV, logits_NV.stride(0))
    tokens = (logits_NV, 0) if token_ids_N is None else (token_ids_N, token_ids_N.stride(0))
    variant: dict[str, int] = {"HALF": logits_NV.dtype == torch.float16, "WIDE": wide}
    variant |= {"LOG_R": log_r, "LOG_T": LOG_THREADS, "LOG_E": log_e}
    for start in range(0, n_rows, rows):
        grid = (min(rows, n_rows - start),)
        _stream_kernel[grid](
            *rows_NV, *tokens, words[1 << log_l :], row_words, stats,
            logps_NS if token_logp_N is None else token_logp_N,
            start, n_vocab, _LOG2_E.value / temperature, temperature,
            HAS_TOKENS=token_logp_N is not None, WORDS=kappa > 0, **variant,
            num_warps=1 << (LOG_THREADS - 5), num_stages=1, enable_fp_fusion=True,
        )  # fmt: skip
        if kappa:
            select_kernel[grid](
                *rows_NV, words, row_words, stats, ids_NS, logps_NS, start, n_vocab, temperature, kappa,
                LOG_K=log_k, LOG_L=log_l, **variant, num_warps=1, num_stages=1, enable_fp_fusion=True,
            )  # fmt: skip
    return TopK(ids_NS, logps_NS, token_logp_N)
