"""The operations as torch.library operators smopd::…: schema, fake kernel, autograd formula.

The public functions check their arguments and call these; torch.compile and torch.export see one node each.
Every implementation asks dispatch which backend serves the call. The loss is in operators_loss.py; what
cannot be an operator is elsewhere: the loss in place in inplace.py, process groups in the public functions.

Shapes: N tokens, V vocabulary, M teachers, S support entries (kappa), R responses, K rewards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from smopd.kernels import checks, dispatch
from smopd.kernels.types import Candidates, SparseTarget, compute_dtype


def operator(name: str, schema: str) -> Callable[[Callable], Any]:
    return torch.library.custom_op(f"smopd::{name}", mutates_args=(), schema=schema)


def empty_column(like: Tensor, *shape: Any, dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor on like's device, of the dtype that rows like these are computed in."""
    return like.new_empty(shape, dtype=dtype or compute_dtype(like.dtype))


# Top-kappa and mixture have no gradient.


@operator(
    "topk_logprobs",
    "(Tensor logits, SymInt kappa, Tensor? token_ids, float temperature)"
    " -> (Tensor ids, Tensor logps, Tensor token_logp)",
)
def topk_logprobs(
    logits: Tensor, kappa: int, token_ids: Tensor | None, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """token_logp is (0,) without token_ids."""
    checks.require_token_ids("topk_logprobs", token_ids, logits.shape[1])
    serve = dispatch.serving("topk_logprobs", logits, kappa=kappa)
    top = serve(logits, kappa, token_ids_N=token_ids, temperature=temperature)
    return top.ids_NS, top.logps_NS, empty_column(logits, 0) if top.token_logp_N is None else top.token_logp_N


@topk_logprobs.register_fake
def _(logits: Tensor, kappa: int, token_ids: Tensor | None, temperature: float) -> tuple[Tensor, ...]:
    n_rows = logits.shape[0]
    ids = empty_column(logits, n_rows, kappa, dtype=torch.int32)
    return ids, empty_column(logits, n_rows, kappa), empty_column(logits, 0 if token_ids is None else n_rows)


@operator(
    "topk_logprobs_teachers",
    "(Tensor[] logits, SymInt kappa, Tensor? token_ids, float temperature)"
    " -> (Tensor ids, Tensor logps, Tensor token_logp)",
)
def topk_logprobs_teachers(
    logits: Sequence[Tensor], kappa: int, token_ids: Tensor | None, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """token_logp is (0, M) without token_ids."""
    first = logits[0]
    checks.require_token_ids("topk_logprobs", token_ids, first.shape[1])
    serve = dispatch.serving("topk_logprobs_teachers", first, kappa=kappa)
    top = serve(logits, kappa, token_ids_N=token_ids, temperature=temperature)
    empty = empty_column(first, 0, len(logits))
    return top.ids_NS, top.logps_NS, empty if top.token_logp_N is None else top.token_logp_N


@topk_logprobs_teachers.register_fake
def _(
    logits: Sequence[Tensor], kappa: int, token_ids: Tensor | None, temperature: float
) -> tuple[Tensor, ...]:
    first, shape = logits[0], (logits[0].shape[0], len(logits))
    ids = empty_column(first, *shape, kappa, dtype=torch.int32)
    rows = 0 if token_ids is None else shape[0]
    return ids, empty_column(first, *shape, kappa), empty_column(first, rows, shape[1])


@operator(
    "teacher_mixture",
    "(Tensor ids, Tensor logps, Tensor log_alpha, SymInt kappa, bool merge)"
    " -> (Tensor ids, Tensor logps, Tensor mass)",
)
def teacher_mixture(
    ids: Tensor, logps: Tensor, log_alpha: Tensor, kappa: int, merge: bool
) -> tuple[Tensor, Tensor, Tensor]:
    serve = dispatch.serving("teacher_mixture", logps, n_pooled=ids.shape[1] * ids.shape[2])
    mixture = serve(ids, logps, log_alpha, kappa, merge=merge)
    return mixture.ids_NS, mixture.logps_NS, mixture.mass_N


@teacher_mixture.register_fake
def _(ids: Tensor, logps: Tensor, log_alpha: Tensor, kappa: int, merge: bool) -> tuple[Tensor, ...]:
    n_rows = ids.shape[0]
    out_ids = empty_column(ids, n_rows, kappa, dtype=torch.int32)
    return out_ids, empty_column(logps, n_rows, kappa), empty_column(logps, n_rows)


# The forward KL is composable, with any upstream gradients.

_KL_SCHEMA = (
    "Tensor logits, Tensor token_ids, Tensor ids, Tensor logps, Tensor? log_alpha, SymInt kappa, bool merge,"
    " bool tail, float temperature"
)


def _kl_target(
    ids: Tensor, logps: Tensor, log_alpha: Tensor | None, kappa: int, merge: bool
) -> SparseTarget | Candidates:
    """Without log_alpha ids and logps are a target (N, S), with it the teachers' candidates (N, M, S)."""
    if log_alpha is None:
        return SparseTarget(ids, logps)
    return Candidates(ids, logps, log_alpha, kappa, merge)


def target_facts(target: SparseTarget | Candidates) -> dict[str, int]:
    """dispatch.serving's facts of a target."""
    if isinstance(target, SparseTarget):
        return {"n_support": target.ids_NS.shape[1]}
    return {"n_support": target.kappa, "n_pooled": target.ids_NMS.shape[1] * target.ids_NMS.shape[2]}


@operator("forward_kl", f"({_KL_SCHEMA}) -> (Tensor logp, Tensor kl)")
def forward_kl(
    logits: Tensor,
    token_ids: Tensor,
    ids: Tensor,
    logps: Tensor,
    log_alpha: Tensor | None,
    kappa: int,
    merge: bool,
    tail: bool,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    target = _kl_target(ids, logps, log_alpha, kappa, merge)
    checks.require_token_ids("forward_kl", token_ids, logits.shape[1])
    checks.require_target_ids("forward_kl", target, logits.shape[1])
    serve = dispatch.serving("forward_kl_rows", logits, **target_facts(target))
    logp, kl = serve(logits, token_ids, target, tail=tail, temperature=temperature)
    # An operator's outputs share no memory; a backend's may.
    return logp, kl.clone() if kl.untyped_storage()._cdata == logp.untyped_storage()._cdata else kl


@forward_kl.register_fake
def _(logits: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_column(logits, logits.shape[0]), empty_column(logits, logits.shape[0])


@operator("forward_kl_gradient", f"({_KL_SCHEMA}, Tensor? dlogp, Tensor? dkl) -> Tensor")
def forward_kl_gradient(
    logits: Tensor,
    token_ids: Tensor,
    ids: Tensor,
    logps: Tensor,
    log_alpha: Tensor | None,
    kappa: int,
    merge: bool,
    tail: bool,
    temperature: float,
    dlogp: Tensor | None,
    dkl: Tensor | None,
) -> Tensor:
    target = _kl_target(ids, logps, log_alpha, kappa, merge)
    serve = dispatch.serving("forward_kl_gradient", logits, **target_facts(target))
    return serve(logits, token_ids, target, tail=tail, temperature=temperature, dlogp_N=dlogp, dkl_N=dkl)


@forward_kl_gradient.register_fake
def _(logits: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(logits)


def _kl_setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    tensors, ctx.options = inputs[:5], inputs[5:]
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


@once_differentiable
def _kl_backward(ctx: Any, dlogp: Tensor | None, dkl: Tensor | None) -> tuple:
    grad = None
    if dlogp is not None or dkl is not None:
        grad = torch.ops.smopd.forward_kl_gradient(*ctx.saved_tensors, *ctx.options, dlogp, dkl)
    return grad, *[None] * 8


forward_kl.register_autograd(_kl_backward, setup_context=_kl_setup)


# Advantages have no gradient.

_REWARDS_SCHEMA = "Tensor rewards, Tensor group, Tensor? weights"


@operator("grpo_advantages", f"({_REWARDS_SCHEMA}, float norm_eps) -> Tensor")
def grpo_advantages(rewards: Tensor, group: Tensor, weights: Tensor | None, norm_eps: float) -> Tensor:
    serve = dispatch.serving("grpo_advantages", rewards)
    return serve(rewards, group, weights_K=weights, norm_eps=norm_eps)


@grpo_advantages.register_fake
def _(rewards: Tensor, *_: Any) -> Tensor:
    return empty_column(rewards, rewards.shape[0])


@operator("gdpo_advantages", f"({_REWARDS_SCHEMA}, Tensor? lengths, str? whiten, float norm_eps) -> Tensor")
def gdpo_advantages(
    rewards: Tensor,
    group: Tensor,
    weights: Tensor | None,
    lengths: Tensor | None,
    whiten: str | None,
    norm_eps: float,
) -> Tensor:
    serve = dispatch.serving("gdpo_advantages", rewards)
    options = {"weights_K": weights, "lengths_R": lengths, "whiten": whiten, "norm_eps": norm_eps}
    return serve(rewards, group, **options)


@gdpo_advantages.register_fake
def _(rewards: Tensor, *_: Any) -> Tensor:
    return empty_column(rewards, rewards.shape[0])


@operator(
    "gd2po_advantages",
    f"({_REWARDS_SCHEMA}, Tensor? lengths, str? whiten, float? snr_threshold, float norm_eps)"
    " -> (Tensor adv, Tensor kept)",
)
def gd2po_advantages(
    rewards: Tensor,
    group: Tensor,
    weights: Tensor | None,
    lengths: Tensor | None,
    whiten: str | None,
    snr_threshold: float | None,
    norm_eps: float,
) -> tuple[Tensor, Tensor]:
    serve = dispatch.serving("gd2po_advantages", rewards)
    options = {"weights_K": weights, "lengths_R": lengths, "whiten": whiten, "norm_eps": norm_eps}
    return serve(rewards, group, snr_threshold=snr_threshold, **options)


@gd2po_advantages.register_fake
def _(rewards: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_column(rewards, rewards.shape[0]), rewards.new_empty(rewards.shape[0], dtype=torch.bool)
