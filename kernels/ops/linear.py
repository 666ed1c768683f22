"""The whole objective on a linear head's hidden states, without its logits: by chunks of tokens.

    logits   = hidden @ weight.T + bias     in the inputs' dtype, as the head itself would make them
    dlogits  = loss_rows(logits)            the backend's, written over the logits
    dhidden  = dlogits @ weight             of the chunk's tokens
    dweight += dlogits.T @ hidden           in fp32 (fp64 for fp64); with a single chunk in weight's dtype
    dbias   += dlogits.sum(0)

Shapes: N packed response tokens, V vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from smopd.kernels import checks
from smopd.kernels.head.chunks import ROW_UNIT, ROW_UNIT_CPU, row_blocks, rows_per_chunk
from smopd.kernels.head.gemm import (
    hidden_gradient_into,
    logits_buffer,
    logits_into,
    weight_gradient_into,
)
from smopd.kernels.ops.library import operator
from smopd.kernels.ops.loss import (
    DEFAULT_SETTINGS,
    N_OBJECTIVE,
    OBJECTIVE_SCHEMA,
    STATS_SCHEMA,
    fake_loss,
    flat_objective,
    objective_of,
    packed_stats,
    scaled_gradient,
    serving_rows,
    total_of,
    unpacked_stats,
)
from smopd.kernels.tokens import TERMS, coefficients, counted, idle, join_terms
from smopd.kernels.types import LossSettings, LossStats, LossTokens, TokenTerms, compute_dtype

OP = "linear_smopd_loss"


def linear_smopd_loss(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    tokens: LossTokens,
    settings: LossSettings = DEFAULT_SETTINGS,
    *,
    bias_V: Tensor | None = None,
    chunk_bytes: int | None = None,
) -> tuple[Tensor, LossStats]:
    """smopd_loss of a linear head's logits, hidden @ weight.T + bias, without ever holding (N, V).

    Logits are made in the inputs' dtype, as the head itself would make them, a chunk of tokens at a time. The
    chunk's gradients in hidden, weight and bias are made with its loss and kept; backward scales them by the
    upstream gradient, in place where the graph is not retained. A tensor that needs no gradient costs none.
    The gradients of weight and bias are summed in fp32 (fp64 for fp64). Autocast changes nothing. What
    smopd_loss says of fp16 holds for the chunk's gradients. A token whose weights are all 0 adds nothing and
    gets the gradient 0; on a CPU it costs no product.

    Args:
        hidden_ND: (N, D).
        weight_VD: (V, D), hidden's dtype.
        tokens, settings: as in smopd_loss.
        bias_V: (V,) or None.
        chunk_bytes: bound of the logits held at a time, in their own dtype; one row is always allowed. None:
            160 MiB on a CPU, 1.25 GiB elsewhere.
    Returns:
        loss: 0-dim, differentiable (once) in hidden_ND, weight_VD and bias_V.
        stats: LossStats, detached.
    Raises:
        TypeError, ValueError: an argument is not as above.
    """
    checks.check_linear(OP, hidden_ND, weight_VD, bias_V, chunk_bytes)
    checks.check_loss_tokens(OP, tokens, settings, ("hidden_ND", hidden_ND))
    grad_enabled, head = torch.is_grad_enabled(), (hidden_ND, weight_VD, bias_V)
    need = [grad_enabled and leaf is not None and leaf.requires_grad for leaf in head]
    loss, _, _, _, *stats = _linear_loss(*head, *flat_objective(tokens, settings), chunk_bytes, *need)
    return loss, unpacked_stats(*stats)


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
    """All tokens' terms and the loss's gradients in hidden, weight and bias, (0,) where not needed."""
    n_rows, n_vocab, wide = hidden_ND.shape[0], weight_VD.shape[0], compute_dtype(hidden_ND.dtype)
    on_cpu = hidden_ND.device.type == "cpu"
    loss_rows = serving_rows(hidden_ND, tokens, settings, n_vocab=n_vocab)
    zero_grad_N = idle(coefficients(tokens, settings, wide))
    any_zero_grad = not on_cpu or bool(zero_grad_N.any())  # asking synchronises an accelerator
    unit = ROW_UNIT_CPU if on_cpu else ROW_UNIT
    blocks = row_blocks(n_rows, rows_per_chunk(hidden_ND, n_vocab, chunk_bytes), unit)
    logits_NV = logits_buffer(max(stop - start for start, stop in blocks), n_vocab, hidden_ND)
    dhidden_ND = hidden_ND.new_empty(hidden_ND.shape if need[0] else 0)
    dweight_VD = weight_VD.new_empty(weight_VD.shape if need[1] else 0, dtype=dweight_dtype)
    dbias_V = weight_VD.new_zeros(n_vocab if need[2] else 0, dtype=wide)
    parts = []
    for start, stop in blocks:
        chunk_ND, chunk_NV = hidden_ND[start:stop], logits_NV[: stop - start]
        logits_into(chunk_NV, chunk_ND, weight_VD, bias_V)
        grad_NV = chunk_NV if any(need) else None
        parts.append(loss_rows(chunk_NV, tokens.at(slice(start, stop)), settings, grad_NV))
        if need[2]:
            dbias_V += chunk_NV.sum(0, dtype=wide)
        if need[0]:
            hidden_gradient_into(dhidden_ND[start:stop], chunk_NV, weight_VD)
        if need[1]:
            if any_zero_grad:  # a hidden state may be infinite there, and 0 * inf is NaN
                chunk_ND = chunk_ND.masked_fill(zero_grad_N[start:stop, None], 0.0)
            weight_gradient_into(dweight_VD, chunk_NV, chunk_ND, accumulate=start > 0)
    return join_terms(parts), dhidden_ND, dweight_VD, dbias_V


# The operator.

N_HEAD = 3  # hidden, weight, bias
_OPTIONS_SCHEMA = "SymInt? chunk_bytes, bool need_hidden, bool need_weight, bool need_bias"
_GRADIENTS_SCHEMA = "Tensor dhidden, Tensor dweight, Tensor dbias"


def _dweight_dtype(hidden: Tensor, weight: Tensor, chunk_bytes: int | None) -> torch.dtype:
    """Of the weight's gradient before backward: wide where chunks are summed."""
    one_chunk = hidden.shape[0] <= rows_per_chunk(hidden, weight.shape[0], chunk_bytes)
    return weight.dtype if one_chunk else compute_dtype(weight.dtype)


@operator(
    "linear_loss",
    f"(Tensor hidden, Tensor weight, Tensor? bias, {OBJECTIVE_SCHEMA}, {_OPTIONS_SCHEMA})"
    f" -> (Tensor loss, {_GRADIENTS_SCHEMA}, {STATS_SCHEMA})",
    n_leaves=N_HEAD,
)
def _linear_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    """A gradient that is not needed is empty: (0,)."""
    tokens, settings = objective_of(rest[:N_OBJECTIVE])
    chunk_bytes, *need = rest[N_OBJECTIVE:]
    checks.require_loss_ids(OP, tokens, settings, weight.shape[0])
    dweight_dtype = _dweight_dtype(hidden, weight, chunk_bytes)
    counted_N = counted(tokens)
    some = hidden.device.type == "cpu" and not bool(counted_N.all())  # asking would synchronise a GPU
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
    total, stats = total_of(terms, tokens, settings)
    return total, dhidden, dweight, dbias, *packed_stats(stats)


@_linear_loss.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    total, stats = fake_loss(hidden, hidden.shape[0])
    chunk_bytes, *need = rest[N_OBJECTIVE:]
    dtypes = (hidden.dtype, _dweight_dtype(hidden, weight, chunk_bytes), compute_dtype(weight.dtype))
    leaves = zip((hidden, weight, weight[:, 0]), dtypes, need, strict=True)
    made = [leaf.new_empty(leaf.shape if needed else 0, dtype=dtype) for leaf, dtype, needed in leaves]
    return total, *made, *stats


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.need, ctx.dtype = inputs[-N_HEAD:], inputs[0].dtype
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1 : 1 + N_HEAD])


@once_differentiable
def _backward(ctx: Any, dloss: Tensor | None, *_: Tensor | None) -> tuple:
    grads: list[Tensor | None] = [None] * N_HEAD
    if dloss is not None:
        for index, (gradient, needed) in enumerate(zip(ctx.saved_tensors, ctx.need, strict=True)):
            grads[index] = scaled_gradient(gradient, dloss, ctx.dtype) if needed else None
    return *grads, *[None] * (N_OBJECTIVE + 1 + N_HEAD)


_linear_loss.register_autograd(_backward, setup_context=_setup)
