"""The C++ backend on the CPU: smopd._C behind the signatures that every backend has.

Arguments are taken as checked, without autograd. Logits are fp32, bf16 or fp16; what is small,
log-probabilities and weights, goes to the kernels as fp32. The sources are in csrc/cpu, the definitions in
kernels/reference.

Shapes: N tokens, V vocabulary, M teachers, S support entries (kappa).
"""

from __future__ import annotations

import functools
import importlib
import math

import torch
from torch import Tensor

from smopd.kernels.types import (
    Candidates,
    KlOptions,
    LossSettings,
    LossTokens,
    Mixture,
    SparseTarget,
    TokenTerms,
    TopK,
    loss_target,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of the logits that the kernels serve


@functools.cache
def unavailable() -> str | None:
    """None if smopd._C can be loaded, else why not."""
    try:
        importlib.import_module("smopd._C")
        torch.ops.smopd.loss_rows_cpu  # noqa: B018  (an attribute error says that it is not registered)
    except (ImportError, OSError, AttributeError) as error:
        return f"smopd._C cannot be loaded ({error})"
    return None


def topk_logprobs(
    logits_NV: Tensor, kappa: int, *, token_ids_N: Tensor | None = None, temperature: float = 1.0
) -> TopK:
    ids_NS, logps_NS, token_logp_N = torch.ops.smopd.topk_logprobs_cpu(
        logits_NV.detach(), kappa, token_ids_N, temperature
    )
    return TopK(ids_NS, logps_NS, None if token_ids_N is None else token_logp_N)


class RunningTopK:
    """ops.linear_topk.RunningTopK, with the bits that topk_logprobs has of the same logits."""

    step = 2048  # kBlockLength

    def __init__(self, like: Tensor, n_rows: int, kappa: int, token_ids_N: Tensor | None, temperature: float):
        self.kappa, self.token_ids_N, self.temperature = kappa, token_ids_N, temperature
        self.known = torch.ops.smopd.topk_begin_cpu(like, n_rows, kappa)

    def add(self, logits_NP: Tensor, first: int) -> None:
        options = (first, self.kappa, self.token_ids_N, self.temperature)
        torch.ops.smopd.topk_piece_cpu(logits_NP.detach(), *options, *self.known)

    def result(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Not right are rows with a NaN or with fewer than kappa logits above -inf."""
        options = (self.kappa, self.token_ids_N is not None, self.temperature)
        return torch.ops.smopd.topk_end_cpu(*self.known, *options)


def teacher_mixture(
    ids_NMS: Tensor, logps_NMS: Tensor, log_alpha: Tensor, kappa: int, *, merge: bool = False
) -> Mixture:
    log_alpha_NM = _float(log_alpha).expand(ids_NMS.shape[:2])
    return Mixture(
        *torch.ops.smopd.teacher_mixture_cpu(ids_NMS, _float(logps_NMS), log_alpha_NM, kappa, merge)
    )


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
    n_rows, n_models, _ = ids_NMS.shape
    weights_NM = _float(weights).expand(n_rows, n_models - 1)
    parts = (weights_NM[:, :reference], weights_NM.new_zeros(n_rows, 1), weights_NM[:, reference:])
    options = (kappa, reference, clip, keep_raised)
    return Mixture(
        *torch.ops.smopd.teacher_product_cpu(ids_NMS, _float(logps_NMS), torch.cat(parts, 1), *options)
    )


def forward_kl_rows(
    logits_NV: Tensor,
    token_ids_N: Tensor,
    target: SparseTarget | Candidates,
    options: KlOptions,
) -> tuple[Tensor, Tensor]:
    """Each token's log-probability and forward KL, (N,) fp32."""
    return torch.ops.smopd.forward_kl_rows_cpu(
        logits_NV.detach(), token_ids_N, *_target(target), options.tail, options.temperature
    )


def forward_kl_gradient(
    logits_NV: Tensor,
    token_ids_N: Tensor,
    target: SparseTarget | Candidates,
    options: KlOptions,
    dlogp_N: Tensor | None,
    dkl_N: Tensor | None,
) -> Tensor:
    """The gradient of sum(dlogp logp + dkl kl) in the logits, (N, V) of their dtype."""
    slopes = (_float_if_any(dlogp_N), _float_if_any(dkl_N))
    return torch.ops.smopd.forward_kl_gradient_cpu(
        logits_NV.detach(), token_ids_N, *_target(target), options.tail, options.temperature, *slopes
    )


def loss_rows(
    logits_NV: Tensor, tokens: LossTokens, settings: LossSettings, grad_NV: Tensor | None
) -> TokenTerms:
    """The terms of each token; the loss's gradient goes to grad_NV if given, which may be the logits."""
    terms = torch.ops.smopd.loss_rows_cpu(
        logits_NV.detach(),
        tokens.token_ids_N,
        _float(tokens.adv_N),
        _float(tokens.pg_weight_N),
        _float_if_any(tokens.old_logp_N),
        _float_if_any(tokens.kl_weight_N),
        _float_if_any(tokens.ent_weight_N),
        _float_if_any(tokens.reverse_adv_N),
        _float_if_any(tokens.reverse_weight_N),
        *_target(loss_target(tokens, settings)),
        settings.tail,
        settings.clip_low,
        settings.clip_high,
        math.inf if settings.dual_clip is None else settings.dual_clip,
        settings.opd_coef,
        settings.entropy_coef,
        settings.temperature,
        settings.kl_temperature,
        settings.reverse_kl_surrogate == "ppo",
        None if grad_NV is None else grad_NV.detach(),
    )
    return TokenTerms(*terms)


def _float(value: Tensor) -> Tensor:
    return value.detach().float()


def _float_if_any(value: Tensor | None) -> Tensor | None:
    return None if value is None else _float(value)


def _target(
    target: SparseTarget | Candidates | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, int, bool]:
    """ids, logps, log_alpha, kappa, merge of the operators' schema."""
    if target is None:
        return None, None, None, 0, False
    if isinstance(target, SparseTarget):
        return target.ids_NS, _float(target.logps_NS), None, 0, False
    log_alpha_NM = _float(target.log_alpha).expand(target.ids_NMS.shape[:2])
    return target.ids_NMS, _float(target.logps_NMS), log_alpha_NM, target.kappa, target.merge
