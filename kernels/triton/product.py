"""The teachers' product over a reference on the GPU: who gave what, the sum of changes, the kappa best, mass.

One launch. A program serves several rows where S is small, and holds the reference's slots; the lists of all
models go past them entry by entry, so that nothing has to be sorted before the last step.

Shapes: N tokens, M models, S their support, K = kappa slots of the result. In kernels: B rows of a program; S
and K padded to powers of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from smopd.kernels.triton.mixture import (
    DTYPES,
    MIN_LOG_P,
    NO_REGISTER_TARGET,
    best_merged,
)
from smopd.kernels.types import Mixture

MAX_SUPPORT = 1024
LOG_TILE = 9  # slots of a program, as far as one row does not have more


@triton.jit
def _said(ids_BS, ids_at_B1, logps_at_B1, live_B1, offs_1S, n_support, stride_ids_s, stride_logps_s):
    """What one list says of the ids, repeats joined by log-sum-exp, and which slots lie behind such an entry.

    ids_at_B1, logps_at_B1: where the list of each row begins.
    """
    said_BS = tl.full(ids_BS.shape, -float("inf"), tl.float32)
    behind_BS = ids_BS != ids_BS
    for s in range(n_support):
        logp_B1 = tl.load(logps_at_B1, mask=live_B1, other=-float("inf")).to(tl.float32)
        given_B1 = live_B1 & (logp_B1 != -float("inf"))
        same_BS = given_B1 & (ids_BS == tl.load(ids_at_B1, mask=given_B1, other=0).to(tl.int32))
        behind_BS = behind_BS | (same_BS & (offs_1S > s))
        high_BS = tl.maximum(said_BS, logp_B1)
        gap_BS = tl.where(said_BS == logp_B1, 0.0, -tl.abs(said_BS - logp_B1))
        joined_BS = tl.where(gap_BS == -float("inf"), high_BS, high_BS + tl.log(1.0 + tl.exp(gap_BS)))
        said_BS = tl.where(same_BS, joined_BS, said_BS)
        logps_at_B1 += stride_logps_s
        ids_at_B1 += stride_ids_s
    return said_BS, behind_BS


@triton.jit(do_not_specialize=["n_rows", "n_models", "reference"])
def _product_kernel(
    ids_ptr, logps_ptr, weights_ptr, out_ids_ptr, out_logps_ptr, mass_ptr,
    n_rows, n_models, n_support, kappa, reference, clip, keep_raised,
    stride_ids_n, stride_ids_m, stride_ids_s, stride_logps_n, stride_logps_m, stride_logps_s,
    stride_weights_n, stride_weights_m,
    LOG_B: tl.constexpr, LOG_S: tl.constexpr, LOG_K: tl.constexpr,
):  # fmt: skip
    B: tl.constexpr = 1 << LOG_B
    K: tl.constexpr = 1 << LOG_K
    rows_B = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    rows_B1 = rows_B[:, None]
    live_B1 = rows_B1 < n_rows
    offs_1S = tl.arange(0, 1 << LOG_S)[None, :]
    live_BS = live_B1 & (offs_1S < n_support)
    s_1S = offs_1S.to(tl.int64)
    own = tl.zeros([1, 1], tl.int64) + reference
    at_BS = rows_B1 * stride_logps_n + own * stride_logps_m + s_1S * stride_logps_s
    own_BS = tl.load(logps_ptr + at_BS, mask=live_BS, other=-float("inf")).to(tl.float32)
    at_BS = rows_B1 * stride_ids_n + own * stride_ids_m + s_1S * stride_ids_s
    there_BS = own_BS != -float("inf")
    ids_BS = tl.load(ids_ptr + at_BS, mask=live_BS & there_BS, other=0).to(tl.int32)

    ids_at_B1 = ids_ptr + rows_B1 * stride_ids_n
    logps_at_B1 = logps_ptr + rows_B1 * stride_logps_n
    base_BS, repeats_BS = _said(
        ids_BS, ids_at_B1 + own * stride_ids_m, logps_at_B1 + own * stride_logps_m,
        live_B1, offs_1S, n_support, stride_ids_s, stride_logps_s,
    )  # fmt: skip
    there_BS = there_BS & ~repeats_BS

    total_BS = tl.zeros(base_BS.shape, tl.float32)
    raises_BS = tl.zeros(base_BS.shape, tl.float32)
    highest_BS = tl.full(base_BS.shape, -float("inf"), tl.float32)
    for other in range(n_models - 1):
        m_11 = tl.zeros([1, 1], tl.int64) + other
        weight_B1 = tl.load(
            weights_ptr + rows_B1 * stride_weights_n + m_11 * stride_weights_m, mask=live_B1, other=0.0
        ).to(tl.float32)
        m_11 += m_11 >= reference
        said_BS, _ = _said(
            ids_BS, ids_at_B1 + m_11 * stride_ids_m, logps_at_B1 + m_11 * stride_logps_m,
            live_B1, offs_1S, n_support, stride_ids_s, stride_logps_s,
        )  # fmt: skip
        there_BS = there_BS & (said_BS != -float("inf"))
        change_BS = tl.where(there_BS, said_BS - base_BS, 0.0)
        change_BS = tl.where(change_BS > clip, clip, tl.where(change_BS < -clip, -clip, change_BS))
        change_BS *= weight_B1
        total_BS += change_BS
        raises_BS += tl.where(change_BS < 0.0, 0.0, change_BS)
        highest_BS = tl.where(change_BS > highest_BS, change_BS, highest_BS)

    logq_BS = base_BS + tl.where(highest_BS > keep_raised, raises_BS, total_BS)
    logq_BS = tl.where(there_BS, logq_BS, -float("inf"))
    peak_B1 = tl.max(tl.where(logq_BS == logq_BS, logq_BS, -float("inf")), 1)[:, None]
    shift_B1 = tl.where(peak_B1 == -float("inf"), 0.0, peak_B1)  # no support, or all of it NaN
    lse_B1 = shift_B1 + tl.log(tl.sum(tl.exp(logq_BS - shift_B1), 1))[:, None]
    logq_BS = tl.where(there_BS, logq_BS - lse_B1, -float("inf"))
    ids_BK, logps_BK = best_merged(tl.where(there_BS, ids_BS, 0), logq_BS, LOG_B, LOG_S, LOG_K)

    ids_BK = tl.where(logps_BK == -float("inf"), 0, ids_BK)
    offs_k = tl.arange(0, K)
    at_BK = rows_B1 * kappa + offs_k[None, :]
    kept_BK = live_B1 & (offs_k < kappa)[None, :]
    tl.store(out_ids_ptr + at_BK, ids_BK, mask=kept_BK)
    tl.store(out_logps_ptr + at_BK, logps_BK, mask=kept_BK)
    mass_B = tl.sum(tl.where((offs_k < kappa)[None, :], tl.exp(logps_BK), 0.0), 1)
    tl.store(mass_ptr + rows_B, mass_B, mask=rows_B < n_rows)
    for start in range(K, kappa, K):  # kappa above the number of slots: empty ones
        kept_BK = live_B1 & (start + offs_k < kappa)[None, :]
        tl.store(out_ids_ptr + at_BK + start, tl.zeros((B, K), tl.int32), mask=kept_BK)
        tl.store(out_logps_ptr + at_BK + start, tl.full((B, K), -float("inf"), tl.float32), mask=kept_BK)


def unserved(op: str, tensor: Tensor, *, n_support: int) -> str | None:
    """Why lists of S = n_support entries are not served; None: they are. tensor: their log-probabilities."""
    if tensor.dtype not in DTYPES:
        return f"the dtype of the log-probabilities is {tensor.dtype}, expected one of {DTYPES}"
    if n_support > MAX_SUPPORT:
        return f"S is {n_support}, expected at most {MAX_SUPPORT}"
    return None


def teacher_product(
    ids_NMS: Tensor,
    logps_NMS: Tensor,
    weights: Tensor,
    kappa: int,
    *,
    reference: int,
    clip: float,
    keep_raised: float,
) -> Mixture:
    why_not = unserved("teacher_product", logps_NMS, n_support=ids_NMS.shape[2])
    if why_not is not None:
        raise ValueError(f"teacher_product: {why_not}")
    n_rows, n_models, n_support = ids_NMS.shape
    device = ids_NMS.device
    if n_rows == 0 or kappa == 0 or n_support == 0:
        ids_NS = torch.zeros(n_rows, kappa, dtype=torch.int32, device=device)
        logps_NS = torch.full((n_rows, kappa), -torch.inf, dtype=torch.float32, device=device)
        return Mixture(ids_NS, logps_NS, torch.zeros(n_rows, dtype=torch.float32, device=device))
    ids_NS = torch.empty(n_rows, kappa, dtype=torch.int32, device=device)
    logps_NS = torch.empty(n_rows, kappa, dtype=torch.float32, device=device)
    mass_N = torch.empty(n_rows, dtype=torch.float32, device=device)
    weights_NM = weights.expand(n_rows, n_models - 1)
    log_s = max((n_support - 1).bit_length(), MIN_LOG_P)
    log_b = max(LOG_TILE - log_s, 0)
    _product_kernel[(triton.cdiv(n_rows, 1 << log_b),)](
        ids_NMS, logps_NMS, weights_NM, ids_NS, logps_NS, mass_N,
        n_rows, n_models, n_support, kappa, reference, clip, keep_raised,
        *ids_NMS.stride(), *logps_NMS.stride(), *weights_NM.stride(),
        LOG_B=log_b, LOG_S=log_s, LOG_K=min(max((kappa - 1).bit_length(), MIN_LOG_P), log_s),
        num_warps=4, num_stages=1, maxnreg=NO_REGISTER_TARGET,
    )  # fmt: skip
    return Mixture(ids_NS, logps_NS, mass_N)
