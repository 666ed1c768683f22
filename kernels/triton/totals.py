"""The weighted sums of the loss over all tokens, in one program without atomics.

Products are rounded to fp32, as in torch, and added in fp64 in a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from smopd.kernels.tokens import STATS_FIELDS, reverse_weight
from smopd.kernels.triton.rows import weighted
from smopd.kernels.types import LossSettings, LossStats, LossTokens, TokenTerms

BLOCK = 1024  # tokens at a time, one per thread
SUMS = ("pg_loss", "kl_loss", "entropy", "reverse_loss")


@triton.jit
def _products(value_ptr, weight_ptr, offs_n, n_rows):
    """Return weight * value of a block of tokens in fp64, or 0 without a weight."""
    if weight_ptr is None:
        return tl.zeros(offs_n.shape, tl.float64)
    else:
        inside = offs_n < n_rows
        weight = tl.load(weight_ptr + offs_n, mask=inside, other=0.0).to(tl.float32)
        return weighted(weight, tl.load(value_ptr + offs_n, mask=inside, other=0.0)).to(tl.float64)


@triton.jit(do_not_specialize=["n_rows"])
def _totals_kernel(
    surrogate_ptr, kl_ptr, entropy_ptr, reverse_ptr,
    pg_weight_ptr, kl_weight_ptr, ent_weight_ptr, reverse_weight_ptr,
    loss_ptr, sums_ptr, n_rows, opd_coef, entropy_coef, BLOCK: tl.constexpr,
):  # fmt: skip
    pg_L = tl.zeros((BLOCK,), tl.float64)
    kl_L = tl.zeros((BLOCK,), tl.float64)
    entropy_L = tl.zeros((BLOCK,), tl.float64)
    reverse_L = tl.zeros((BLOCK,), tl.float64)
    for start in tl.range(0, n_rows, BLOCK, loop_unroll_factor=4):
        offs_n = start + tl.arange(0, BLOCK)
        pg_L += _products(surrogate_ptr, pg_weight_ptr, offs_n, n_rows)
        kl_L += _products(kl_ptr, kl_weight_ptr, offs_n, n_rows)
        entropy_L += _products(entropy_ptr, ent_weight_ptr, offs_n, n_rows)
        reverse_L += _products(reverse_ptr, reverse_weight_ptr, offs_n, n_rows)
    pg = tl.sum(pg_L, 0).to(tl.float32)
    kl = tl.sum(kl_L, 0).to(tl.float32)
    entropy = tl.sum(entropy_L, 0).to(tl.float32)
    reverse = tl.sum(reverse_L, 0).to(tl.float32)
    tl.store(sums_ptr, pg)
    tl.store(sums_ptr + 1, kl)
    tl.store(sums_ptr + 2, entropy)
    tl.store(sums_ptr + 3, reverse)
    loss = pg + weighted(opd_coef, kl + reverse) - weighted(entropy_coef, entropy)
    tl.store(loss_ptr, loss)


def total_loss(terms: TokenTerms, tokens: LossTokens, settings: LossSettings) -> tuple[Tensor, LossStats]:
    """See kernels.reference.loss.total_loss. The four sums are views of one tensor."""
    values = (terms.surrogate_N, terms.kl_N, terms.entropy_N, terms.reverse_N)
    weights = (tokens.pg_weight_N, tokens.kl_weight_N, tokens.ent_weight_N, reverse_weight(tokens))
    loss, sums_4 = terms.kl_N.new_empty(()), terms.kl_N.new_empty(len(SUMS))
    _totals_kernel[(1,)](
        *(value_N.contiguous() for value_N in values),
        *(None if weight_N is None else weight_N.contiguous() for weight_N in weights),
        loss, sums_4, terms.kl_N.shape[0], settings.opd_coef, settings.entropy_coef,
        BLOCK=BLOCK, num_warps=BLOCK // 32, enable_fp_fusion=True,
    )  # fmt: skip
    columns = {name: getattr(terms, name) for name in STATS_FIELDS if name.endswith("_N")}
    return loss, LossStats(**columns, **dict(zip(SUMS, sums_4.unbind(), strict=True)))
