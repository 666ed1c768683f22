"""The product kernel: adds the teachers' changes to the reference, keeps the kappa best and their mass.

One warp per row compares W slots of the reference at a time with C entries of a model's list at a time. Ids
that are negative or need more than 32 bits are ignored.

Shapes: N tokens, M models, S their support, K = kappa slots of the result. In kernels S and K are padded to
powers of two; T = S / W.
"""

from __future__ import annotations

from dataclasses import astuple

import triton
import triton.language as tl
from torch import Tensor

from smopd.kernels.triton.mixture import (
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
LOG_W = 6  # log2 of the slots compared at a time
LOG_C = 5  # log2 of the list entries compared at a time

_PLACE_BITS = tl.constexpr(16)  # low bits hold an index below MAX_SUPPORT, high bits a count
_ONE_FOUND = tl.constexpr(1 << 16)
_NO_ENTRY = tl.constexpr(-1)  # differs from the id of every slot
_NO_SLOT = tl.constexpr(-2)  # differs from the id of every entry


@triton.jit
def _lookup(ids_W, slot_W, ids_ptr, logps_ptr, n_support, stride_ids_s, stride_logps_s, C: tl.constexpr):
    """Return a list's log-probability of each id (repeats joined) and which slots repeat an earlier one."""
    found_W = tl.zeros(ids_W.shape, tl.int32)
    offs_C1 = tl.arange(0, C)[:, None]
    for start in range(0, n_support, C):
        place_C = start + tl.arange(0, C)
        live_C = place_C < n_support
        s_C = place_C.to(tl.int64)
        logps_C = tl.load(logps_ptr + s_C * stride_logps_s, mask=live_C, other=-float("inf")).to(tl.float32)
        ids_C = as_int32(tl.load(ids_ptr + s_C * stride_ids_s, mask=live_C, other=0))
        ids_C = tl.where(logps_C == -float("inf"), _NO_ENTRY, ids_C)
        # Indices within the chunk are constants.
        here_W = tl.sum(tl.where(ids_C[:, None] == ids_W[None, :], _ONE_FOUND + offs_C1, 0), 0)
        found_W += here_W + start * (here_W >> _PLACE_BITS)
    repeats_W = ids_W != ids_W
    if tl.max(found_W, 0) < 2 * _ONE_FOUND:
        at_W = (found_W & (_ONE_FOUND - 1)).to(tl.int64) * stride_logps_s
        found_logps_W = tl.load(logps_ptr + at_W, mask=found_W > 0, other=-float("inf")).to(tl.float32)
    else:
        found_logps_W = tl.full(ids_W.shape, -float("inf"), tl.float32)
        for s in range(n_support):
            logp = tl.load(logps_ptr).to(tl.float32)
            same_W = ids_W == tl.where(logp == -float("inf"), _NO_ENTRY, as_int32(tl.load(ids_ptr)))
            repeats_W = repeats_W | (same_W & (slot_W > s))
            found_logps_W = tl.where(same_W, log_add(found_logps_W, logp), found_logps_W)
            logps_ptr += stride_logps_s
            ids_ptr += stride_ids_s
    return found_logps_W, repeats_W


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
    ref_ids_ptr = ids_ptr + reference.to(tl.int64) * stride_ids_m
    ref_logps_ptr = logps_ptr + reference.to(tl.int64) * stride_logps_m

    offs_T1 = tl.arange(0, S // W)[:, None]
    ids_TW = tl.full((S // W, W), _NO_SLOT, tl.int32)  # ids that all models gave
    logq_TW = tl.full((S // W, W), -float("inf"), tl.float32)
    for t in range(tl.cdiv(n_support, W)):
        slot_W = t * W + tl.arange(0, W)
        live_W = slot_W < n_support
        s_W = slot_W.to(tl.int64)
        ref_W = tl.load(ref_logps_ptr + s_W * stride_logps_s, mask=live_W, other=-float("inf")).to(tl.float32)
        ids_W = as_int32(tl.load(ref_ids_ptr + s_W * stride_ids_s, mask=live_W, other=0))
        ids_W = tl.where((ref_W == -float("inf")) | (ids_W < 0), _NO_SLOT, ids_W)
        base_W, repeats_W = _lookup(
            ids_W, slot_W, ref_ids_ptr, ref_logps_ptr, n_support, stride_ids_s, stride_logps_s, C
        )
        common_W = (ids_W != _NO_SLOT) & ~repeats_W

        total_W = tl.zeros((W,), tl.float32)
        raises_W = tl.zeros((W,), tl.float32)
        highest_W = tl.full((W,), -float("inf"), tl.float32)
        for other in range(n_models - 1):
            m = tl.zeros([], tl.int64) + other
            weight = tl.load(weights_ptr + m * stride_weights_m).to(tl.float32)
            m += m >= reference
            found_logps_W, _ = _lookup(
                ids_W, slot_W, ids_ptr + m * stride_ids_m, logps_ptr + m * stride_logps_m,
                n_support, stride_ids_s, stride_logps_s, C,
            )  # fmt: skip
            common_W = common_W & (found_logps_W != -float("inf"))
            change_W = tl.where(common_W, found_logps_W - base_W, 0.0)
            change_W = tl.where(change_W > clip, clip, tl.where(change_W < -clip, -clip, change_W))
            change_W *= weight
            total_W += change_W
            raises_W += tl.where(change_W < 0.0, 0.0, change_W)
            highest_W = tl.where(change_W > highest_W, change_W, highest_W)
        logq_W = base_W + tl.where(highest_W > keep_raised, raises_W, total_W)
        at_TW = (offs_T1 == t) & common_W[None, :]
        ids_TW = tl.where(at_TW, ids_W[None, :], ids_TW)
        logq_TW = tl.where(at_TW, logq_W[None, :], logq_TW)

    ids_1S = tl.reshape(ids_TW, [1, S])
    logq_1S = tl.reshape(logq_TW, [1, S])
    common_1S = ids_1S != _NO_SLOT
    peak_1 = tl.max(tl.where(logq_1S == logq_1S, logq_1S, -float("inf")), 1)
    shift_1 = tl.where(peak_1 == -float("inf"), 0.0, peak_1)  # no support, or only NaN
    lse_1 = shift_1 + tl.log(tree_sum(tl.exp(logq_1S - shift_1[:, None]), 1, LOG_S))
    logq_1S = tl.where(common_1S, logq_1S - lse_1[:, None], -float("inf"))
    ids_1K, logps_1K = best_merged(tl.where(common_1S, ids_1S, 0), logq_1S, 0, LOG_S, LOG_K)

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
    """Return why a product of lists of n_support entries cannot be computed here, or None."""
    return None if n_support <= MAX_SUPPORT else f"S is {n_support}, expected at most {MAX_SUPPORT}"


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
