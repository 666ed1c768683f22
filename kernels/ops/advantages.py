"""Group advantages over several rewards: GRPO, GDPO and GD2PO.

Shapes: R responses, K rewards.
"""

from __future__ import annotations

from dataclasses import fields
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
    return _advantages("grpo_advantages", rewards_RK, group_R, options)[0]


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
    return _advantages("gdpo_advantages", rewards_RK, group_R, options, process_group)[0]


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
    if snr_threshold is not None and not snr_threshold > 0:
        raise ValueError(f"{op}: snr_threshold is {snr_threshold}, expected None or a number above 0")
    return _advantages(op, rewards_RK, group_R, options, process_group)


def _advantages(
    op: str, rewards_RK: Tensor, group_R: Tensor, options: AdvantageOptions, process_group: Any = None
) -> tuple[Tensor, Tensor]:
    """By the operator, which takes no process group."""
    checks.check_rewards(op, rewards_RK, group_R, options)
    rewards_RK = rewards_RK.detach()
    if process_group is None:
        return _operator(rewards_RK, group_R, *(getattr(options, field.name) for field in fields(options)))
    return dispatch.serving("advantages", rewards_RK)(rewards_RK, group_R, options, process_group)


# The operator takes AdvantageOptions flattened. It has no gradient.


@operator(
    "advantages",
    "(Tensor rewards, Tensor group, str kind, Tensor? weights, Tensor? lengths, str? whiten,"
    " float? snr_threshold, float norm_eps) -> (Tensor adv, Tensor kept)",
)
def _operator(rewards: Tensor, group: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """kept is (0,) but of GD2PO."""
    serve = dispatch.serving("advantages", rewards)
    adv, kept = serve(rewards, group, AdvantageOptions(*options), None)
    return adv, rewards.new_empty(0, dtype=torch.bool) if kept is None else kept


@_operator.register_fake
def _(rewards: Tensor, group: Tensor, kind: str, *_: Any) -> tuple[Tensor, Tensor]:
    n_kept = rewards.shape[0] if kind == "gd2po" else 0
    return empty_column(rewards, rewards.shape[0]), rewards.new_empty(n_kept, dtype=torch.bool)
