"""The teachers' product over a reference on the GPU: who gave what, the sum of changes, the kappa best, mass.

A warp a row compares the reference's slots, W at a time, with every model's list, C entries at a time. An id
that is negative or needs more than 32 bits is left out.

Shapes: N tokens, M models, S their support, K = kappa slots of the result. In kernels: S and K padded to
powers of two, T = S / W.
"""

from __future__ import annotations

from dataclasses import astuple

import triton
import triton.language as tl
from torch import Tensor

from smopd.kernels.triton.mixture import (
    DTYPES,
    MIN_LOG_P,
    NO_REGISTER_TARGET,
    as_int32,
    best_merged,
    emptied,
    log_add,
    mixture_of,
    tree_sum,
)
from smopd.kernels.types import Mixture, ProductOptions

MAX_SUPPORT = 1024
LOG_W = 6  # slots that are compared at a time
LOG_C = 5  # with so many entries of a list

_PLACE_BITS = tl.constexpr(16)  # of a place, below MAX_SUPPORT; a count is above them
_ONE_FOUND = tl.constexpr(1 << 16)
_NO_ENTRY = tl.constexpr(-1)  # no slot's id
_NO_SLOT = tl.constexpr(-2)  # no entry's id


@triton.jit
def _said(ids_W, slot_W, ids_ptr, logps_ptr, n_support, stride_ids_s, stride_logps_s, C: tl.constexpr):
    """What one list says of the ids, repeats joined by log-sum-exp, and which slots lie behind one."""
    found_W = tl.zeros(ids_W.shape, tl.int32)
    offs_C1 = tl.arange(0, C)[:, None]
    for start in range(0, n_support, C):
        place_C = start + tl.arange(0, C)
        live_C = place_C < n_support
        s_C = place_C.to(tl.int64)
        logps_C = tl.load(logps_ptr + s_C * stride_logps_s, mask=live_C, other=-float("inf")).to(tl.float32)
        ids_C = as_int32(tl.load(ids_ptr + s_C * stride_ids_s, mask=live_C, other=0))
        ids_C = tl.where(logps_C == -float("inf"), _NO_ENTRY, ids_C)
        # Places from the chunk's first entry on: constants.
        here_W = tl.sum(tl.where(ids_C[:, None] == ids_W[None, :], _ONE_FOUND + offs_C1, 0), 0)
        found_W += here_W + start * (here_W >> _PLACE_BITS)
    behind_W = ids_W != ids_W
    if tl.max(found_W, 0) < 2 * _ONE_FOUND:
        at_W = (found_W & (_ONE_FOUND - 1)).to(tl.int64) * stride_logps_s
        said_W = tl.load(logps_ptr + at_W, mask=found_W > 0, other=-float("inf")).to(tl.float32)
    else:
        said_W = tl.full(ids_W.shape, -float("inf"), tl.float32)
        for s in range(n_support):
            logp = tl.load(logps_ptr).to(tl.float32)
            same_W = ids_W == tl.where(logp == -float("inf"), _NO_ENTRY, as_int32(tl.load(ids_ptr)))
            behind_W = behind_W | (same_W & (slot_W > s))
            said_W = tl.where(same_W, log_add(said_W, logp), said_W)
            logps_ptr += stride_logps_s
            ids_ptr += stride_ids_s
    return said_W, behind_W


@triton.jit(do_not_specialize=["n_models", "reference"])
def _product_kernel(
    ids_ptr, logps_ptr, weights_ptr, out_ids_ptr, out_logps_ptr, mass_ptr,
    n_models, n_support, kappa, reference, clip, keep_raised,
    stride_ids_n, stride_ids_m, stride_ids_s, stride_logps_n, stride_logps_m, stride_logps_s,
    stride_weights_n, stride_weights_m,
    LOG_S: tl.constexpr, LOG_K: tl.constexpr, LOG_W: tl.constexpr, LOG_C: tl.constexpr,
):  # fmt: skip
    K: tl.constexpr = 1 << LOG_K
    S: tl.constexpr = 1 << LOG_S
    W: tl.constexpr = 1 << LOG_W
    C: tl.constexpr = 1 << LOG_C
    row = tl.program_id(0).to(tl.int64)
    ids_ptr += row * stride_ids_n
    logps_ptr += row * stride_logps_n
    weights_ptr += row * stride_weights_n
    own_ids_ptr = ids_ptr + reference.to(tl.int64) * stride_ids_m
    own_logps_ptr = logps_ptr + reference.to(tl.int64) * stride_logps_m

    offs_T1 = tl.arange(0, S // W)[:, None]
    ids_TW = tl.full((S // W, W), _NO_SLOT, tl.int32)  # of the slots that all models gave
    logq_TW = tl.full((S // W, W), -float("inf"), tl.float32)
    for t in range(tl.cdiv(n_support, W)):
        slot_W = t * W + tl.arange(0, W)
        live_W = slot_W < n_support
        s_W = slot_W.to(tl.int64)
        own_W = tl.load(own_logps_ptr + s_W * stride_logps_s, mask=live_W, other=-float("inf")).to(tl.float32)
        ids_W = as_int32(tl.load(own_ids_ptr + s_W * stride_ids_s, mask=live_W, other=0))
        ids_W = tl.where((own_W == -float("inf")) | (ids_W < 0), _NO_SLOT, ids_W)
        base_W, behind_W = _said(
            ids_W, slot_W, own_ids_ptr, own_logps_ptr, n_support, stride_ids_s, stride_logps_s, C
        )
        there_W = (ids_W != _NO_SLOT) & ~behind_W

        total_W = tl.zeros((W,), tl.float32)
        raises_W = tl.zeros((W,), tl.float32)
        highest_W = tl.full((W,), -float("inf"), tl.float32)
        for other in range(n_models - 1):
            m = tl.zeros([], tl.int64) + other
            weight = tl.load(weights_ptr + m * stride_weights_m).to(tl.float32)
            m += m >= reference
            said_W, _ = _said(
                ids_W, slot_W, ids_ptr + m * stride_ids_m, logps_ptr + m * stride_logps_m,
                n_support, stride_ids_s, stride_logps_s, C,
            )  # fmt: skip
            there_W = there_W & (said_W != -float("inf"))
            change_W = tl.where(there_W, said_W - base_W, 0.0)
            change_W = tl.where(change_W > clip, clip, tl.where(change_W < -clip, -clip, change_W))
            change_W *= weight
            total_W += change_W
            raises_W += tl.where(change_W < 0.0, 0.0, change_W)
            highest_W = tl.where(change_W > highest_W, change_W, highest_W)
        logq_W = base_W + tl.where(highest_W > keep_raised, raises_W, total_W)
        here_TW = (offs_T1 == t) & there_W[None, :]
        ids_TW = tl.where(here_TW, ids_W[None, :], ids_TW)
        logq_TW = tl.where(here_TW, logq_W[None, :], logq_TW)

    ids_1S = tl.reshape(ids_TW, [1, S])
    logq_1S = tl.reshape(logq_TW, [1, S])
    there_1S = ids_1S != _NO_SLOT
    peak_1 = tl.max(tl.where(logq_1S == logq_1S, logq_1S, -float("inf")), 1)
    shift_1 = tl.where(peak_1 == -float("inf"), 0.0, peak_1)  # no support, or all of it NaN
    lse_1 = shift_1 + tl.log(tree_sum(tl.exp(logq_1S - shift_1[:, None]), 1, LOG_S))
    logq_1S = tl.where(there_1S, logq_1S - lse_1[:, None], -float("inf"))
    ids_1K, logps_1K = best_merged(tl.where(there_1S, ids_1S, 0), logq_1S, 0, LOG_S, LOG_K)

    ids_1K = tl.where(logps_1K == -float("inf"), 0, ids_1K)
    offs_1K = tl.arange(0, K)[None, :]
    at_1K = row * kappa + offs_1K
    tl.store(out_ids_ptr + at_1K, ids_1K, mask=offs_1K < kappa)
    tl.store(out_logps_ptr + at_1K, logps_1K, mask=offs_1K < kappa)
    mass_1 = tree_sum(tl.where(offs_1K < kappa, tl.exp(logps_1K), 0.0), 1, LOG_K)
    tl.store(mass_ptr + row + tl.arange(0, 1), mass_1)
    for start in range(K, kappa, K):  # kappa above the number of slots: empty ones
        kept_1K = start + offs_1K < kappa
        tl.store(out_ids_ptr + at_1K + start, tl.zeros((1, K), tl.int32), mask=kept_1K)
        tl.store(out_logps_ptr + at_1K + start, tl.full((1, K), -float("inf"), tl.float32), mask=kept_1K)


def unserved(op: str, tensor: Tensor, *, n_support: int) -> str | None:
    """Why lists of S = n_support entries are not served; None: they are. tensor: their log-probabilities."""
    if tensor.dtype not in DTYPES:
        return f"the dtype of the log-probabilities is {tensor.dtype}, expected one of {DTYPES}"
    if n_support > MAX_SUPPORT:
        return f"S is {n_support}, expected at most {MAX_SUPPORT}"
    return None


def teacher_product(
    ids_NMS: Tensor, logps_NMS: Tensor, weights: Tensor, kappa: int, options: ProductOptions
) -> Mixture:
    n_rows, n_models, n_support = ids_NMS.shape
    product = mixture_of(n_rows, kappa, ids_NMS.device)
    if n_rows == 0 or kappa == 0 or n_support == 0:
        return emptied(product)
    weights_NM = weights.expand(n_rows, n_models - 1)
    log_s = max((n_support - 1).bit_length(), MIN_LOG_P)
    _product_kernel[(n_rows,)](
        ids_NMS, logps_NMS, weights_NM, product.ids_NS, product.logps_NS, product.mass_N,
        n_models, n_support, kappa, *astuple(options),
        *ids_NMS.stride(), *logps_NMS.stride(), *weights_NM.stride(),
        LOG_S=log_s, LOG_K=min(max((kappa - 1).bit_length(), MIN_LOG_P), log_s),
        LOG_W=min(log_s, LOG_W), LOG_C=LOG_C,
        num_warps=1, num_stages=1, maxnreg=NO_REGISTER_TARGET, enable_fp_fusion=True,
    )  # fmt: skip
    return product
