"""The loss on a linear head's hidden states. Logits exist for one chunk of tokens at a time:

logits   = hidden @ weight.T + bias     in the inputs' dtype
dlogits  = loss_rows(logits)            in the memory of the logits
dhidden  = dlogits @ weight             of the chunk's tokens
dweight += dlogits.T @ hidden           in fp32 (fp64 for fp64); one chunk: in the weight's dtype
dbias   += dlogits.sum(0)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from smopd.kernels import checks, dispatch
from smopd.kernels.head import hidden_gradient_into, logit_chunks, rows_per_chunk, weight_gradient_into
from smopd.kernels.ops import loss as dense
from smopd.kernels.ops.library import operator
from smopd.kernels.tokens import TERMS, coefficients, counted, idle, join_terms
from smopd.kernels.types import LossSettings, LossStats, LossTokens, TokenTerms, compute_dtype

OP = "linear_smopd_loss"


def linear_smopd_loss(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    tokens: LossTokens,
    settings: LossSettings = dense.DEFAULT_SETTINGS,
    *,
    bias_V: Tensor | None = None,
    chunk_bytes: int | None = None,
) -> tuple[Tensor, LossStats]:
    """Compute smopd_loss of the logits hidden @ weight.T + bias without holding (N, V).

    Logits have the inputs' dtype and are computed a chunk of tokens at a time. Forward also computes the
    gradients that are needed; backward scales them by the upstream gradient, in place unless the graph is
    retained. Gradients of weight and bias are summed in fp32 (fp64 for fp64). Autocast has no effect. The
    note on fp16 in smopd_loss applies. On a CPU tokens whose weights are all 0 are skipped.

    Args:
        hidden_ND: (N, D).
        weight_VD: (V, D), hidden's dtype.
        tokens, settings: see smopd_loss.
        bias_V: (V,) or None.
        chunk_bytes: limit of the logits held at a time, at least one row. None: 160 MiB on a CPU, else
            1.25 GiB.
    Returns:
        loss: 0-dim, differentiable (once) in hidden_ND, weight_VD and bias_V; and detached LossStats.
    """
    checks.check_linear(OP, hidden_ND, weight_VD, bias_V, chunk_bytes)
    checks.check_loss_tokens(OP, tokens, settings, ("hidden_ND", hidden_ND))
    grad_enabled, head = torch.is_grad_enabled(), (hidden_ND, weight_VD, bias_V)
    need = [grad_enabled and leaf is not None and leaf.requires_grad for leaf in head]
    loss, _, _, _, *stats = _linear_loss(*head, *dense.flat_objective(tokens, settings), chunk_bytes, *need)
    return loss, dense.unpacked_stats(*stats)


def _in_chunks(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    tokens: LossTokens,
    settings: LossSettings,
    chunk_bytes: int | None,
    need: Sequence[bool],
    dweight_dtype: torch.dtype,
) -> tuple[TokenTerms, Tensor, Tensor, Tensor]:
    """Compute all tokens' terms and the gradients of hidden, weight and bias, (0,) if not needed."""
    n_vocab, wide = weight_VD.shape[0], compute_dtype(hidden_ND.dtype)
    loss_rows = dense.serving_rows(hidden_ND, tokens, settings, n_vocab=n_vocab)
    zero_grad_N = idle(coefficients(tokens, settings, wide))
    any_zero_grad = hidden_ND.device.type != "cpu" or bool(zero_grad_N.any())  # this would synchronize a GPU
    dhidden_ND = hidden_ND.new_empty(hidden_ND.shape if need[0] else 0)
    dweight_VD = weight_VD.new_empty(weight_VD.shape if need[1] else 0, dtype=dweight_dtype)
    dbias_V = weight_VD.new_zeros(n_vocab if need[2] else 0, dtype=wide)
    parts = []
    for rows, chunk_NV in logit_chunks(hidden_ND, weight_VD, bias_V, chunk_bytes):
        parts.append(loss_rows(chunk_NV, tokens.at(rows), settings, chunk_NV if any(need) else None))
        if need[2]:
            dbias_V += chunk_NV.sum(0, dtype=wide)
        if need[0]:
            hidden_gradient_into(dhidden_ND[rows], chunk_NV, weight_VD)
        if need[1]:
            chunk_ND = hidden_ND[rows]
            if any_zero_grad:  # 0 * inf would be NaN
                chunk_ND = chunk_ND.masked_fill(zero_grad_N[rows, None], 0.0)
            weight_gradient_into(dweight_VD, chunk_NV, chunk_ND, accumulate=rows.start > 0)
    return join_terms(parts), dhidden_ND, dweight_VD, dbias_V


N_HEAD = 3  # hidden, weight, bias
_OPTIONS_SCHEMA = "SymInt? chunk_bytes, bool need_hidden, bool need_weight, bool need_bias"
_GRADIENTS_SCHEMA = "Tensor dhidden, Tensor dweight, Tensor dbias"


def _dweight_dtype(hidden: Tensor, weight: Tensor, chunk_bytes: int | None) -> torch.dtype:
    """Return the dtype of the weight's gradient before backward: the compute dtype if chunks are summed."""
    one_chunk = hidden.shape[0] <= rows_per_chunk(hidden, weight.shape[0], chunk_bytes)
    return weight.dtype if one_chunk else compute_dtype(weight.dtype)


@operator(
    "linear_loss",
    f"(Tensor hidden, Tensor weight, Tensor? bias, {dense.OBJECTIVE_SCHEMA}, {_OPTIONS_SCHEMA})"
    f" -> (Tensor loss, {_GRADIENTS_SCHEMA}, {dense.STATS_SCHEMA})",
    n_leaves=N_HEAD,
)
def _linear_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    """Return gradients that are not needed as (0,)."""
    tokens, settings = dense.objective_of(rest[: dense.N_OBJECTIVE])
    chunk_bytes, *need = rest[dense.N_OBJECTIVE :]
    checks.require_loss_ids(OP, tokens, settings, weight.shape[0])
    dweight_dtype = _dweight_dtype(hidden, weight, chunk_bytes)
    counted_N = counted(tokens)
    some = hidden.device.type == "cpu" and not bool(counted_N.all())  # this would synchronize a GPU
    rows: Any = counted_N.nonzero()[:, 0] if some else slice(None)
    with torch.autocast(hidden.device.type, enabled=False):
        terms, dhidden, dweight, dbias = _in_chunks(
            hidden[rows], weight, bias, tokens.at(rows), settings, chunk_bytes, need, dweight_dtype
        )

    def scatter(values: Tensor) -> Tensor:
        return values.new_zeros(hidden.shape[0], *values.shape[1:]).index_copy_(0, rows, values)

    if some:
        terms = TokenTerms(*(scatter(getattr(terms, name)) for name in TERMS))
        dhidden = scatter(dhidden) if need[0] else dhidden
    total, stats = dispatch.serving("total_loss", terms.kl_N)(terms, tokens, settings)
    return total, dhidden, dweight, dbias, *dense.packed_stats(stats)


@_linear_loss.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    total, stats = dense.fake_loss(hidden, hidden.shape[0])
    chunk_bytes, *need = rest[dense.N_OBJECTIVE :]
    dtypes = (hidden.dtype, _dweight_dtype(hidden, weight, chunk_bytes), compute_dtype(weight.dtype))
    leaves = zip((hidden, weight, weight[:, 0]), dtypes, need, strict=True)
    made = [leaf.new_empty(leaf.shape if needed else 0, dtype=dtype) for leaf, dtype, needed in leaves]
    return total, *made, *stats


dense.register_computed_gradients(_linear_loss)
