"""The loss of packed tokens, from their logits or from the hidden states and weight of a linear head.

The forward pass also computes the gradients, and the backward pass only scales them. With a head, only one
chunk of tokens has logits at a time:

logits   = hidden @ weight.T + bias     in the inputs' dtype
dlogits  = loss_rows(logits)            in the memory of the logits
dhidden  = dlogits @ weight             of the chunk's tokens
dweight += dlogits.T @ hidden           in fp32 (fp64 for fp64), or the weight's dtype for a single chunk
dbias   += dlogits.sum(0)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from smopd.kernels import checks, dispatch
from smopd.kernels.head import hidden_gradient_into, logit_chunks, rows_per_chunk, weight_gradient_into
from smopd.kernels.ops.library import Operator, empty_column, operator
from smopd.kernels.tokens import STATS_FIELDS, TERMS, coefficients, counted, idle, join_terms
from smopd.kernels.types import LossSettings, LossStats, LossTokens, TokenTerms, compute_dtype, loss_target

DEFAULT_SETTINGS = LossSettings()
OP, LINEAR = "smopd_loss", "linear_smopd_loss"


def smopd_loss(
    logits_NV: Tensor, tokens: LossTokens, settings: LossSettings = DEFAULT_SETTINGS, *, inplace: bool = False
) -> tuple[Tensor, LossStats]:
    """Compute the whole loss (Eq. 9) of packed tokens and its gradient in one pass over the logits.

        loss = sum_n pg_weight_n surrogate_n
             + opd_coef (sum_n kl_weight_n kl_n + sum_n reverse_weight_n reverse_n)
             - entropy_coef sum_n ent_weight_n entropy_n

    Here ratio = exp(clamp(logp - old_logp, -20, 20)) at settings.temperature, or 1 without old_logp, and

        surrogate = max(-adv ratio, -adv clip(ratio, 1 - clip_low, 1 + clip_high)),
                    limited to -c adv by dual_clip c if adv < 0,
        kl        = kl_N of topk_forward_kl at settings.kl_temperature,
        reverse   = -clip(ratio) reverse_adv (Eq. 17), or max(-ratio reverse_adv, that) with "ppo",
        entropy   = the row's entropy at settings.temperature.

    The terms are summed, not averaged, because the weights include the denominators. LossStats.clipped_N
    reports every clip. A NaN in a token's target makes the token's KL and both masses NaN. If the coefficient
    of the KL is not 0, the gradient is NaN, too.

    With fp16 logits, the forward pass rounds the gradient to fp16 before backward scales it. Entries below
    2^-14 lose bits, and entries below 2^-25 become 0. To avoid this, multiply the weights by a power of two
    and divide the loss by it, as in (loss / 8192).backward().

    Args:
        logits_NV: (N, V), unit stride along V.
        tokens: N tokens on the device of the logits.
        inplace: overwrite the logits with the gradient. They must be the whole output of an operation.
            Backward raises if another differentiable operation uses them afterwards, and it raises if called
            twice. Logits that require no gradient are not overwritten.
    Returns:
        The 0-dim loss, differentiable (once) in logits_NV, and the detached LossStats.
    """
    checks.check_logits(OP, logits_NV)
    checks.check_loss_tokens(OP, tokens, settings, ("logits_NV", logits_NV))
    need_grad = torch.is_grad_enabled() and logits_NV.requires_grad
    if inplace and need_grad:
        loss, _, *stats = _in_place(logits_NV, tokens, settings)
    else:
        loss, _, *stats = _loss(logits_NV, *flat_objective(tokens, settings), need_grad)
    return loss, unpacked_stats(*stats)


TOKEN_FIELDS = tuple(field.name for field in fields(LossTokens))
SETTING_FIELDS = tuple(field.name for field in fields(LossSettings))
_SETTING_TYPES = {"float": "float", "float | None": "float?", "int": "SymInt", "bool": "bool", "str": "str"}
_TENSORS = [f"Tensor{'?' * (field.default is not MISSING)} {field.name}" for field in fields(LossTokens)]
_OPTIONS = [f"{_SETTING_TYPES[str(field.type)]} {field.name}" for field in fields(LossSettings)]
OBJECTIVE_SCHEMA = ", ".join(_TENSORS + _OPTIONS)
STATS_SCHEMA = "Tensor columns, Tensor clipped, Tensor sums"
_COLUMNS = tuple(name for name in STATS_FIELDS if name.endswith("_N") and name != "clipped_N")
_SUMS = tuple(name for name in STATS_FIELDS if not name.endswith("_N"))
N_OBJECTIVE = len(TOKEN_FIELDS) + len(SETTING_FIELDS)


def flat_objective(tokens: LossTokens, settings: LossSettings) -> tuple:
    columns = [getattr(tokens, name) for name in TOKEN_FIELDS]
    return (*columns, *(getattr(settings, name) for name in SETTING_FIELDS))


def objective_of(flat: Sequence[Any]) -> tuple[LossTokens, LossSettings]:
    tokens = LossTokens(**dict(zip(TOKEN_FIELDS, flat[: len(TOKEN_FIELDS)], strict=True)))
    return tokens, LossSettings(**dict(zip(SETTING_FIELDS, flat[len(TOKEN_FIELDS) :], strict=True)))


def packed_stats(stats: LossStats) -> tuple[Tensor, Tensor, Tensor]:
    """Return STATS_SCHEMA's tensors: (C, N), (N,) and (4,). An operator's outputs may not share memory."""
    columns, sums = (_stacked([getattr(stats, name) for name in names]) for names in (_COLUMNS, _SUMS))
    return columns, stats.clipped_N, sums


def _stacked(parts: list[Tensor]) -> Tensor:
    """Return torch.stack(parts), as a view if the parts are adjacent in memory."""
    first, size = parts[0], parts[0].numel()
    for number, part in enumerate(parts):
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (same and part.storage_offset() == first.storage_offset() + number * size):
            return torch.stack(parts)
    return first.as_strided((len(parts), *first.shape), (size, *first.stride()))


def unpacked_stats(columns: Tensor, clipped: Tensor, sums: Tensor) -> LossStats:
    named = dict(zip((*_COLUMNS, *_SUMS), (*columns.unbind(), *sums.unbind()), strict=True))
    return LossStats(**named, clipped_N=clipped)


def fake_loss(like: Tensor, n_rows: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    columns = empty_column(like, len(_COLUMNS), n_rows)
    clipped = empty_column(like, n_rows, dtype=torch.int8)
    return empty_column(like), (columns, clipped, empty_column(like, len(_SUMS)))


def serving_rows(tensor: Tensor, tokens: LossTokens, settings: LossSettings, **facts: int) -> Callable:
    """Return the loss_rows for this call. `facts` must include n_vocab if `tensor` is not the logits."""
    target = loss_target(tokens, settings)
    if target is not None:
        facts |= {"n_support": target.n_entries, "n_pooled": target.n_pooled}
    return dispatch.serving("loss_rows", tensor, **facts)


def _loss_of_rows(
    logits: Tensor, tokens: LossTokens, settings: LossSettings, grad: Tensor | None
) -> tuple[Tensor, LossStats]:
    checks.require_loss_ids(OP, tokens, settings, logits.shape[1])
    terms = serving_rows(logits, tokens, settings)(logits, tokens, settings, grad)
    return dispatch.serving("total_loss", terms.kl_N)(terms, tokens, settings)


@operator(
    "loss",
    f"(Tensor logits, {OBJECTIVE_SCHEMA}, bool need_grad) -> (Tensor loss, Tensor grad, {STATS_SCHEMA})",
    n_leaves=1,
)
def _loss(logits: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Return the loss, its gradient (of shape (0, V) without need_grad) and the statistics."""
    *objective, need_grad = rest
    tokens, settings = objective_of(objective)
    grad = torch.empty_like(logits) if need_grad else logits.new_empty((0, logits.shape[1]))
    total, stats = _loss_of_rows(logits, tokens, settings, grad if need_grad else None)
    return total, grad, *packed_stats(stats)


@_loss.register_fake
def _(logits: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    total, stats = fake_loss(logits, logits.shape[0])
    grad = torch.empty_like(logits) if rest[-1] else logits.new_empty((0, logits.shape[1]))
    return total, grad, *stats


def register_computed_gradients(op: Operator) -> None:
    """Register a backward that scales the gradients of the leaves. The forward returns them after the loss.

    The operator's last n_leaves arguments say which leaves need a gradient.
    """

    def setup(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.need, ctx.dtype, ctx.n_inputs = inputs[-op.n_leaves :], inputs[0].dtype, len(inputs)
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output[1 : 1 + op.n_leaves])

    @once_differentiable
    def backward(ctx: Any, dloss: Tensor | None, *_: Tensor | None) -> tuple:
        grads: list[Tensor | None] = [None] * ctx.n_inputs
        if dloss is not None:
            for index, (gradient, needed) in enumerate(zip(ctx.saved_tensors, ctx.need, strict=True)):
                grads[index] = _scaled(gradient, dloss, ctx.dtype) if needed else None
        return tuple(grads)

    op.register_autograd(backward, setup_context=setup)


register_computed_gradients(_loss)


def _scaled(grad: Tensor, dloss: Tensor, dtype: torch.dtype) -> Tensor:
    """Return grad * dloss, rounded once to `dtype`. Unless the graph is retained, `grad` may change."""
    traced = type(dloss) is not Tensor  # torch.compile and torch.export have no value to read
    if not traced and grad.dtype != dtype and grad.device.type != "cpu":
        rounded = torch.empty_like(grad, dtype=dtype)
        dispatch.serving("scale_", grad)(grad, dloss, rounded)
        return rounded
    if not traced and not torch._C._autograd._get_current_graph_task_keep_graph():
        dispatch.serving("scale_", grad)(grad, dloss)
        return grad.to(dtype)
    return (grad.to(compute_dtype(grad.dtype)) * dloss).to(dtype)


class _LossInPlace(torch.autograd.Function):
    """Overwrites the logits with the gradient. Marks their owner dirty, so that autograd detects later uses.

    owner: the base tensor of the logits. Autograd cannot mark a view dirty if there are other outputs.
    layout: size, stride and offset of the logits in the owner.
    """

    @staticmethod
    def forward(
        ctx: Any, owner: Tensor, layout: tuple, tokens: LossTokens, settings: LossSettings
    ) -> tuple[Tensor, ...]:
        logits_NV = owner.as_strided(*layout)
        loss, stats = _loss_of_rows(logits_NV, tokens, settings, logits_NV)
        packed = packed_stats(stats)
        ctx.mark_dirty(owner)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(owner)
        ctx.spent = False
        ctx.mark_non_differentiable(*packed)
        return loss, owner, *packed

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dloss: Tensor | None, downer: Tensor | None, *_: Tensor
    ) -> tuple[Tensor | None, ...]:
        if downer is not None:
            used = "logits_NV was used in another differentiable operation after inplace=True"
            raise RuntimeError(f"smopd_loss: {used}, expected no use: it holds the gradient")
        if ctx.spent:
            raise RuntimeError("smopd_loss: got a second backward with inplace=True; use inplace=False")
        ctx.spent = True
        grad = None
        if dloss is not None:
            grad = ctx.saved_tensors[0].detach()
            dispatch.serving("scale_", grad)(grad, dloss)
        return grad, None, None, None


@torch._disable_dynamo  # which would trace into the backends
def _in_place(logits_NV: Tensor, tokens: LossTokens, settings: LossSettings) -> Any:
    layout = (logits_NV.size(), logits_NV.stride(), logits_NV.storage_offset())
    return _LossInPlace.apply(_owner(logits_NV), layout, tokens, settings)


def _owner(logits_NV: Tensor) -> Tensor:
    owner = logits_NV._base if logits_NV._is_view() and logits_NV._base is not None else logits_NV
    if owner.is_leaf or logits_NV.is_leaf:
        raise ValueError("smopd_loss: logits_NV is a leaf, expected an operation's output for inplace=True")
    if owner.numel() != logits_NV.numel() or owner.dtype != logits_NV.dtype:
        text = f"is a view of {logits_NV.numel()} of the {owner.numel()} elements of {tuple(owner.shape)}"
        raise ValueError(f"smopd_loss: logits_NV {text}, expected all of them for inplace=True")
    return owner


def linear_smopd_loss(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    tokens: LossTokens,
    settings: LossSettings = DEFAULT_SETTINGS,
    *,
    bias_V: Tensor | None = None,
    chunk_bytes: int | None = None,
) -> tuple[Tensor, LossStats]:
    """Compute smopd_loss for the logits hidden @ weight.T + bias without storing all (N, V) of them at once.

    The logits have the inputs' dtype and are computed chunk by chunk. The forward pass also computes the
    needed gradients. The backward pass scales them by the upstream gradient, in place unless the graph is
    retained. Gradients of weight and bias are summed in fp32 (fp64 for fp64). Autocast has no effect. The
    note on fp16 in smopd_loss applies. On a CPU, tokens whose weights are all 0 are skipped.

    Args:
        hidden_ND: (N, D).
        weight_VD: (V, D) in the dtype of hidden_ND.
        tokens, settings: see smopd_loss.
        bias_V: (V,) or None.
        chunk_bytes: upper limit for the logits of a chunk, which has at least one row. None stands for
            160 MiB on a CPU and 1.25 GiB elsewhere.
    Returns:
        The 0-dim loss, differentiable (once) in hidden_ND, weight_VD and bias_V, and the detached LossStats.
    """
    checks.check_linear(LINEAR, hidden_ND, weight_VD, bias_V, chunk_bytes)
    checks.check_loss_tokens(LINEAR, tokens, settings, ("hidden_ND", hidden_ND))
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
    """Compute all terms, and the gradients of hidden, weight and bias (of shape (0,) if not needed)."""
    n_vocab, wide = weight_VD.shape[0], compute_dtype(hidden_ND.dtype)
    loss_rows = serving_rows(hidden_ND, tokens, settings, n_vocab=n_vocab)
    zero_grad_N = idle(coefficients(tokens, settings, wide))
    any_zero_grad = hidden_ND.device.type != "cpu" or bool(zero_grad_N.any())  # any() would synchronize a GPU
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


def _dweight_dtype(hidden: Tensor, weight: Tensor, chunk_bytes: int | None) -> torch.dtype:
    """Return the weight gradient's dtype before backward. For several chunks, it is the compute dtype."""
    one_chunk = hidden.shape[0] <= rows_per_chunk(hidden, weight.shape[0], chunk_bytes)
    return weight.dtype if one_chunk else compute_dtype(weight.dtype)


@operator(
    "linear_loss",
    f"(Tensor hidden, Tensor weight, Tensor? bias, {OBJECTIVE_SCHEMA}, SymInt? chunk_bytes, bool need_hidden,"
    " bool need_weight, bool need_bias) -> (Tensor loss, Tensor dhidden, Tensor dweight, Tensor dbias,"
    f" {STATS_SCHEMA})",
    n_leaves=3,
)
def _linear_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    """Return the loss, the gradients (of shape (0,) if not needed) and the statistics."""
    tokens, settings = objective_of(rest[:N_OBJECTIVE])
    chunk_bytes, *need = rest[N_OBJECTIVE:]
    checks.require_loss_ids(LINEAR, tokens, settings, weight.shape[0])
    dweight_dtype = _dweight_dtype(hidden, weight, chunk_bytes)
    counted_N = counted(tokens)
    some = hidden.device.type == "cpu" and not bool(counted_N.all())  # all() would synchronize a GPU
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
    return total, dhidden, dweight, dbias, *packed_stats(stats)


@_linear_loss.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    total, stats = fake_loss(hidden, hidden.shape[0])
    chunk_bytes, *need = rest[N_OBJECTIVE:]
    dtypes = (hidden.dtype, _dweight_dtype(hidden, weight, chunk_bytes), compute_dtype(weight.dtype))
    leaves = zip((hidden, weight, weight[:, 0]), dtypes, need, strict=True)
    made = [leaf.new_empty(leaf.shape if needed else 0, dtype=dtype) for leaf, dtype, needed in leaves]
    return total, *made, *stats


register_computed_gradients(_linear_loss)
