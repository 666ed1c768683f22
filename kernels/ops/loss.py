"""The whole objective of packed tokens: on logits, and on a linear head without its logits.

Shapes: N packed response tokens, V vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from smopd.kernels import checks, dispatch
from smopd.kernels.head import loss as linear
from smopd.kernels.ops import operators_linear, operators_loss
from smopd.kernels.ops.inplace import smopd_loss_inplace
from smopd.kernels.ops.operators_loss import flat_objective, scale_, unpacked_stats
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
        LossStats.clipped_N. A NaN in a token's target makes its KL, both masses and its gradient NaN.

    fp16 logits: the gradient is rounded to fp16 for an upstream gradient of 1, and scaled in backward. An
        entry below 2^-25 is 0 by then and one below 2^-14 has lost bits: with weights of 1/8192 all of
        p < 2^-12. A loss scale comes too late; put a power of two into the weights, and its inverse before
        the loss: (loss / 8192).backward(). bf16 and fp32 are not concerned.

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
    return loss, unpacked_stats(*stats)


def linear_smopd_loss(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    tokens: LossTokens,
    settings: LossSettings = DEFAULT_SETTINGS,
    *,
    bias_V: Tensor | None = None,
    chunk_bytes: int | None = None,
    recompute: bool = False,
    tp_group: Any = None,
    shard_sizes: Sequence[int] | None = None,
    main_grad_VD: Tensor | None = None,
    compact: bool | None = None,
) -> tuple[Tensor, LossStats]:
    """smopd_loss of a linear head's logits, hidden @ weight.T + bias, without ever holding (N, V).

    Logits are made in the inputs' dtype, as the head itself would make them, a chunk of tokens at a time. The
    chunk's gradients in hidden, weight and bias are made with its loss and kept; backward scales them by the
    upstream gradient, in place where the graph is not retained. A tensor that needs no gradient costs none.
    The gradients of weight and bias are summed in fp32 (fp64 for fp64). Autocast changes nothing. What
    smopd_loss says of fp16 holds for the chunk's gradients; recompute knows the upstream gradient first.

    recompute=True makes tiles of tokens and a piece of the vocabulary instead, and makes them again in
    backward: four matrix products instead of three, for chunk_bytes and the gradients themselves as the only
    memory.

    Args:
        hidden_ND: (N, D).
        weight_VD: (V, D), hidden's dtype; under tp_group this rank's rows of it, in rank order.
        tokens, settings: as in smopd_loss.
        bias_V: (V,) or None, cut like the weight.
        chunk_bytes: bound of the logits held at a time, in their own dtype; one row, or a tile of one row
            and 1024 columns, is always allowed. None: on a CPU 160 MiB, and 32 MiB with recompute; elsewhere
            1 GiB and 256 MiB.
        recompute: keep the inputs and O(N S) numbers, nothing else, between forward and backward.
        tp_group: process group that holds the head in shards of any sizes above 0, each rank with the same
            hidden states and tokens. Every rank gets the whole loss, the whole gradient of hidden, and its
            shard's of weight and bias. The ranks exchange O(N S) numbers and the sum of hidden's gradient.
        shard_sizes: the number of rows at each rank of tp_group; None: they are asked, which costs one host
            synchronisation on an accelerator.
        main_grad_VD: (V, D) fp32 (fp64 for fp64), to which backward adds the weight's gradient;
            weight_VD.grad stays as it is. With recompute the products are summed into it; else a sum of its
            size stands beside it until backward.
        compact: leave out the tokens whose weights are all 0 before any product. None: on a CPU; elsewhere
            True costs one host synchronisation. Either way they add exactly nothing and get the gradient 0.
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
    if torch.compiler.is_compiling() and tp_group is None and main_grad_VD is None and not recompute:
        need = [
            torch.is_grad_enabled() and x is not None and x.requires_grad
            for x in (hidden_ND, weight_VD, bias_V)
        ]
        options = (chunk_bytes, compact, *need)
        operator = operators_linear.linear_loss
        loss, _, _, _, *stats = operator(
            hidden_ND, weight_VD, bias_V, *flat_objective(tokens, settings), *options
        )
        return loss, unpacked_stats(*stats)
    backend: dict[str, Any] = {} if hidden_ND.device.type == "cpu" else {"scale_": scale_}
    if recompute or tp_group is not None:
        form = "recompute" if recompute else "tp_group"
        backend["tile_loss"] = dispatch.tile_loss(op, form, hidden_ND)
    else:
        backend["loss_rows"] = operators_linear.serving_rows(hidden_ND, weight_VD, tokens, settings)
    return linear.linear_smopd_loss(
        hidden_ND,
        weight_VD,
        tokens,
        settings,
        bias_V=bias_V,
        chunk_bytes=chunk_bytes,
        recompute=recompute,
        tp_group=tp_group,
        shard_sizes=shard_sizes,
        main_grad_VD=main_grad_VD,
        compact=compact,
        **backend,
    )
