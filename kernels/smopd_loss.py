"""The whole objective of packed tokens: on logits, and on a linear head without its logits.

Shapes: N packed response tokens, V vocabulary, D hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smopd.kernels import checks, dispatch, operators_loss, reference_linear
from smopd.kernels.inplace import smopd_loss_inplace
from smopd.kernels.operators_loss import flat_objective
from smopd.kernels.reference_linear import CHUNK_BYTES
from smopd.kernels.types import LossSettings, LossStats, LossTokens

DEFAULT_SETTINGS = LossSettings()


def smopd_loss(
    logits_NV: Tensor,
    tokens: LossTokens,
    settings: LossSettings = DEFAULT_SETTINGS,
    *,
    inplace: bool = False,
) -> tuple[Tensor, LossStats]:
    """The whole objective (Eq. 9) of packed tokens, with its gradient, in one pass over their logits.

        loss = sum_n pg_weight_n surrogate_n
             + opd_coef (sum_n kl_weight_n kl_n + sum_n reverse_weight_n reverse_n)
             - entropy_coef sum_n ent_weight_n entropy_n

    with ratio = exp(clamp(logp - old_logp, -20, 20)) at settings.temperature (1 without old_logp),

        surrogate = max(-adv ratio, -adv clip(ratio, 1 - clip_low, 1 + clip_high));
                    with dual_clip c and adv < 0 at most -c adv,
        kl        = topk_forward_kl's at settings.kl_temperature,
        reverse   = -clip(ratio) reverse_adv (Eq. 17), or with "ppo" the form of the surrogate,
        entropy   = the row's entropy at settings.temperature.

    Sums, not means: the denominators are in the weights. Nothing is clamped silently: see
        LossStats.clipped_N.

    Args:
        logits_NV: (N, V), unit stride along V.
        tokens: LossTokens of the same N and device.
        settings: LossSettings.
        inplace: write the gradient over the logits' memory instead of keeping a second (N, V). The logits
            have to be the output of an operation, whole; whatever needs their values afterwards raises, and
            so does a second backward. Without a gradient to compute nothing is written.
    Returns:
        loss: 0-dim, differentiable (once) in logits_NV.
        stats: LossStats, detached.
    Raises:
        TypeError, ValueError: an argument is not as above, or inplace=True on a leaf or on a part of a
            tensor.
    """
    op = "smopd_loss"
    checks.check_logits(op, logits_NV)
    checks.check_loss_tokens(op, tokens, settings, ("logits_NV", logits_NV))
    if checks.debugging():
        checks.debug_finite(op, "logits_NV", logits_NV, allow_minus_inf=True)
        checks.debug_loss_tokens(op, tokens, logits_NV.shape[1])
    need_grad = torch.is_grad_enabled() and logits_NV.requires_grad
    if inplace and need_grad:
        return smopd_loss_inplace(logits_NV, tokens, settings)
    loss, _, *stats = operators_loss.loss(logits_NV, *flat_objective(tokens, settings), need_grad)
    return loss, LossStats(*stats)


def linear_smopd_loss(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    tokens: LossTokens,
    settings: LossSettings = DEFAULT_SETTINGS,
    *,
    bias_V: Tensor | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    recompute: bool = False,
    tp_group: Any = None,
) -> tuple[Tensor, LossStats]:
    """smopd_loss of a linear head's logits, hidden @ weight.T + bias, without ever holding (N, V).

    Each chunk's gradients in hidden, weight and bias are made with its loss and kept; backward scales them by
    the upstream gradient. A tensor that needs no gradient costs none. The weight's gradient is summed in fp32
    (fp64 for fp64) over the chunks.

    Args:
        hidden_ND: (N, D).
        weight_VD: (V, D), hidden's dtype; under tp_group this rank's rows of it, in rank order.
        tokens, settings: as in smopd_loss.
        bias_V: (V,) or None, cut like the weight.
        chunk_bytes: bound of the fp32 logits held at a time.
        recompute: keep nothing but the inputs and make the chunks again in backward.
        tp_group: process group that holds the head in shards, each rank with the same hidden states and
            tokens. Every rank gets the whole loss, the whole gradient of hidden, and its shard's of weight
            and bias.
    Returns:
        loss: 0-dim, differentiable (once) in hidden_ND, weight_VD and bias_V.
        stats: LossStats, detached.
    Raises:
        TypeError, ValueError: an argument is not as above.
    """
    op = "linear_smopd_loss"
    checks.check_linear(op, hidden_ND, weight_VD, bias_V, chunk_bytes)
    checks.check_loss_tokens(op, tokens, settings, ("hidden_ND", hidden_ND))
    if checks.debugging():
        checks.debug_finite(op, "hidden_ND", hidden_ND)
        checks.debug_finite(op, "weight_VD", weight_VD)
        if tp_group is None:
            checks.debug_loss_tokens(op, tokens, weight_VD.shape[0])
    dispatch.backend_for(op, hidden_ND)
    return reference_linear.linear_smopd_loss(
        hidden_ND,
        weight_VD,
        tokens,
        settings,
        bias_V=bias_V,
        chunk_bytes=chunk_bytes,
        recompute=recompute,
        tp_group=tp_group,
    )
