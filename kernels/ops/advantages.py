"""Group advantages from several rewards: GRPO, GDPO and GD2PO. Shapes: R responses, K rewards."""

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
    """Normalise each response's weighted reward sum S in its group: (S - mean) / (sigma + norm_eps) (GRPO).

    Sigma is the unbiased standard deviation. The advantage is exactly 0 in a group of one and in a group
    whose sums are equal up to rounding. A response with a NaN reward of nonzero weight has advantage 0 and is
    left out of its group's mean and sigma.

    Args:
        rewards_RK: (R, K). NaN marks a reward that could not be scored.
        group_R: (R,) int64, the id of each response's group, in any order. A group must be on one rank.
        weights_K: (K,), or None for weights of 1.
    Returns:
        adv_R: (R,).
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
    """Normalise each reward in its group (Eq. 1), sum by weight (Eq. 2) and whiten the sums (Eq. 3) (GDPO).

        A_RK = (r - mean_group) / (sigma_group + norm_eps)
        A_R  = sum_k w_k A_k
        whiten="responses": (A - mean) / (sigma + norm_eps) over responses (the paper)
        whiten="tokens":    (A - mean) / sqrt(var + 1e-8) over tokens (each response counts lengths_R times)
        whiten=None:        A

    Each sigma and var is unbiased. A_k is exactly 0 if the reward is NaN, if it is NaN for all other
    responses of the group, or if the group's rewards are equal up to rounding. A response whose rewards of
    nonzero weight are all NaN is left out of the whitening and has A_R = 0.

    Args:
        rewards_RK, group_R: as in grpo_advantages.
        weights_K: (K,), or None for weights of 1. After whitening, only their ratios matter.
        lengths_R: (R,) response lengths in tokens. Required by "tokens", where length 0 gives advantage 0.
        whiten: "responses", "tokens" or None.
        process_group: whiten over the ranks of this group with one all-reduce of (n, mean, M2). Every rank
            must call this function, even if it has no responses.
    Returns:
        adv_R: (R,), all 0 if there are fewer than two samples to whiten.
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
    """Compute GDPO advantages, but drop each response whose rewards disagree (GD2PO).

    As in the official code, each reward is normalised in its group to A_k. A response conflicts if some
    w_k A_k with |A_k| > 1e-8 is positive and another one is negative. With snr_threshold, the ratio
    |sum_k w_k A_k| / (sum_k |w_k A_k| + norm_eps) must also be below the threshold. The advantage of a
    conflicting response is 0. That of any other response is sum_k w_k A_k times the share of its group that
    is kept. Only kept responses are whitened.

    Args:
        rewards_RK, group_R, weights_K, lengths_R, whiten, process_group: see gdpo_advantages.
        snr_threshold: above 0, or None for GD2PO-Hard.
    Returns:
        adv_R: (R,), 0 for dropped responses. All are 0 if whitening has fewer than two samples.
        kept_R: (R,) bool.
    """
    options = AdvantageOptions("gd2po", weights_K, lengths_R, whiten, snr_threshold, norm_eps)
    return _advantages("gd2po_advantages", rewards_RK, group_R, options, process_group)


def _advantages(
    op: str, rewards_RK: Tensor, group_R: Tensor, options: AdvantageOptions, process_group: Any = None
) -> tuple[Tensor, Tensor]:
    checks.check_rewards(op, rewards_RK, group_R, options)
    rewards_RK = rewards_RK.detach()
    if process_group is None:
        return _operator(rewards_RK, group_R, *(getattr(options, field.name) for field in fields(options)))
    return dispatch.serving("advantages", rewards_RK)(rewards_RK, group_R, options, process_group)


@operator(
    "advantages",
    "(Tensor rewards, Tensor group, str kind, Tensor? weights, Tensor? lengths, str? whiten,"
    " float? snr_threshold, float norm_eps) -> (Tensor adv, Tensor kept)",
)
def _operator(rewards: Tensor, group: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """Return adv and kept, which is empty except for GD2PO. `options` are the fields of AdvantageOptions."""
    serve = dispatch.serving("advantages", rewards)
    adv, kept = serve(rewards, group, AdvantageOptions(*options), None)
    return adv, rewards.new_empty(0, dtype=torch.bool) if kept is None else kept


@_operator.register_fake
def _(rewards: Tensor, group: Tensor, kind: str, *_: Any) -> tuple[Tensor, Tensor]:
    n_kept = rewards.shape[0] if kind == "gd2po" else 0
    return empty_column(rewards, rewards.shape[0]), rewards.new_empty(n_kept, dtype=torch.bool)
