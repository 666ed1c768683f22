"""Group advantages over several rewards: GRPO, GDPO and GD2PO.

Shapes: R responses, K rewards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smopd.kernels import checks, dispatch
from smopd.kernels.ops.library import empty_column, operator
from smopd.kernels.types import AdvantageOptions


def grpo_advantages(
    rewards_RK: Tensor, group_R: Tensor, *, weights_K: Tensor | None = None, norm_eps: float = 1e-6
) -> Tensor:
    """GRPO: the weighted sum of the rewards, normalised in its group: (S - mean) / (sigma + norm_eps).

    Sigma is unbiased. Exactly 0 in a group of one, in a group whose sums are equal up to rounding, and for a
    response with a NaN (unscorable) reward of nonzero weight, which its group's statistics leave out.

    Args:
        rewards_RK: (R, K); NaN marks an unscorable reward.
        group_R: (R,) int64, the prompt of each response, any numbers in any order; a group is never cut by
            ranks.
        weights_K: (K,) or None: all 1.
    Returns:
        adv_R: (R,).
    Raises:
        TypeError, ValueError: an argument is not as above.
    """
    options = AdvantageOptions("grpo", weights_K, norm_eps=norm_eps)
    checks.check_rewards("grpo_advantages", rewards_RK, group_R, options)
    return _advantages(rewards_RK, group_R, options)


def gdpo_advantages(
    rewards_RK: Tensor,
    group_R: Tensor,
    *,
    weights_K: Tensor | None = None,
    lengths_R: Tensor | None = None,
    whiten: str | None = "responses",
    norm_eps: float = 1e-6,
    process_group: Any = None,
) -> Tensor:
    """GDPO: each reward normalised in its group (Eq. 1), summed by weight (Eq. 2), whitened (Eq. 3).

        A_RK = (r - mean_group) / (sigma_group + norm_eps)
        A_R  = sum_k w_k A_k
        "responses": (A - mean) / (sigma + norm_eps) over responses (the paper)
        "tokens":    (A - mean) / sqrt(var + 1e-8) over response tokens: each response counts lengths_R times
        None:        A

    Sigmas are unbiased. Before whitening a reward adds exactly 0 to a NaN (unscorable) response, to a group
    with one scorable response and to a group whose rewards are equal up to rounding.

    Args:
        rewards_RK, group_R: as in grpo_advantages.
        weights_K: (K,) or None: all 1. Whitening removes their sum, not their ratios.
        lengths_R: (R,) response lengths in tokens; required by "tokens". A response of length 0 gets 0.
        whiten: "responses", "tokens" or None.
        process_group: whiten over all its ranks: one all-reduce of (n, mean, M2), merged by Chan's rule.
            Every rank has to call, with responses or without.
    Returns:
        adv_R: (R,); zeros if one sample or none is there to whiten.
    Raises:
        TypeError, ValueError: an argument is not as above.
    """
    options = AdvantageOptions("gdpo", weights_K, lengths_R, whiten, norm_eps=norm_eps)
    checks.check_rewards("gdpo_advantages", rewards_RK, group_R, options)
    return _advantages(rewards_RK, group_R, options, process_group)


def gd2po_advantages(
    rewards_RK: Tensor,
    group_R: Tensor,
    *,
    weights_K: Tensor | None = None,
    lengths_R: Tensor | None = None,
    whiten: str | None = "tokens",
    snr_threshold: float | None = None,
    norm_eps: float = 1e-6,
    process_group: Any = None,
) -> tuple[Tensor, Tensor]:
    """GD2PO: GDPO without the responses whose rewards pull in opposite directions.

    In the official order: normalise each reward in its group; a response conflicts if its per-reward
    advantages above 1e-8 in size, each with its weight's sign, have both signs (Hard), and with snr_threshold
    only if also |sum_k w_k A_k| / (sum_k |w_k A_k| + norm_eps) < snr_threshold; A = sum_k w_k A_k times the
    group's kept share; 0 for conflicting responses; whiten over what is kept. A reward of weight 0 never
    conflicts.

    Args:
        rewards_RK, group_R, weights_K, lengths_R, whiten, process_group: as in gdpo_advantages.
        snr_threshold: None for GD2PO-Hard; else above 0.
    Returns:
        adv_R: (R,); 0 where dropped, and everywhere if one sample or none is kept.
        kept_R: (R,) bool.
    Raises:
        TypeError, ValueError: an argument is not as above.
    """
    op = "gd2po_advantages"
    options = AdvantageOptions("gd2po", weights_K, lengths_R, whiten, snr_threshold, norm_eps)
    checks.check_rewards(op, rewards_RK, group_R, options)
    if snr_threshold is not None and not snr_threshold > 0:
        raise ValueError(f"{op}: snr_threshold is {snr_threshold}, expected None or a number above 0")
    return _advantages(rewards_RK, group_R, options, process_group)


def _advantages(
    rewards_RK: Tensor, group_R: Tensor, options: AdvantageOptions, process_group: Any = None
) -> Any:
    """By the operator, which takes no process group."""
    rewards_RK = rewards_RK.detach()
    if process_group is not None:
        return _served(rewards_RK, group_R, options, process_group)
    names = _ARGUMENTS[options.kind]
    return _OPERATORS[options.kind](rewards_RK, group_R, *(getattr(options, name) for name in names))


def _served(rewards_RK: Tensor, group_R: Tensor, options: AdvantageOptions, process_group: Any = None) -> Any:
    serve = dispatch.serving(f"{options.kind}_advantages", rewards_RK)
    adv_R, kept_R = serve(rewards_RK, group_R, options, process_group)
    return adv_R if options.kind != "gd2po" else (adv_R, kept_R)


# The operators take AdvantageOptions flattened. None has a gradient.

_SCHEMA = {
    "weights_K": "Tensor? weights",
    "lengths_R": "Tensor? lengths",
    "whiten": "str? whiten",
    "snr_threshold": "float? snr_threshold",
    "norm_eps": "float norm_eps",
}
_ARGUMENTS = {
    "grpo": ("weights_K", "norm_eps"),
    "gdpo": ("weights_K", "lengths_R", "whiten", "norm_eps"),
    "gd2po": tuple(_SCHEMA),
}


def _operator(kind: str) -> Any:
    names = _ARGUMENTS[kind]
    arguments = ", ".join(["Tensor rewards", "Tensor group", *(_SCHEMA[name] for name in names)])
    result = "(Tensor adv, Tensor kept)" if kind == "gd2po" else "Tensor"

    @operator(f"{kind}_advantages", f"({arguments}) -> {result}")
    def advantages(rewards: Tensor, group: Tensor, *values: Any) -> Any:
        return _served(rewards, group, AdvantageOptions(kind, **dict(zip(names, values, strict=True))))

    @advantages.register_fake
    def _(rewards: Tensor, *_: Any) -> Any:
        adv = empty_column(rewards, rewards.shape[0])
        return adv if kind != "gd2po" else (adv, rewards.new_empty(rewards.shape[0], dtype=torch.bool))

    return advantages


_OPERATORS = {kind: _operator(kind) for kind in _ARGUMENTS}
