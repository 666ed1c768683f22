"""One advantage a response from several rewards.

GRPO, GDPO or GD2PO over the whole rollout batch and all ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from smopd.config.settings import Advantage
from smopd.ops import gd2po_advantages, gdpo_advantages, grpo_advantages


def advantages(
    settings: Advantage,
    rewards_RK: Tensor,
    group_R: Tensor,
    lengths_R: Tensor,
    weights: list[float],
    process_group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor]:
    """(R,) advantages and (R,) whether the estimator kept the rollout.

    Args:
        rewards_RK: NaN where a reward could not score.
        group_R: int64, equal for rollouts of one prompt; a group lies on one rank.
        lengths_R: response tokens.
        weights: the priority profile, one a reward.
    """
    weights_K = torch.tensor(weights, dtype=rewards_RK.dtype, device=rewards_RK.device)
    kept_R = torch.ones(len(rewards_RK), dtype=torch.bool, device=rewards_RK.device)
    if settings.estimator == "grpo":
        adv_R = grpo_advantages(rewards_RK, group_R, weights_K=weights_K, norm_eps=settings.norm_eps)
        return adv_R, kept_R
    whiten = None if settings.whiten == "none" else settings.whiten
    if settings.estimator == "gdpo":
        adv_R = gdpo_advantages(
            rewards_RK,
            group_R,
            weights_K=weights_K,
            lengths_R=lengths_R,
            whiten=whiten,
            norm_eps=settings.norm_eps,
            process_group=process_group,
        )
        return adv_R, kept_R
    return gd2po_advantages(
        rewards_RK,
        group_R,
        weights_K=weights_K,
        lengths_R=lengths_R,
        whiten=whiten,
        snr_threshold=settings.snr_threshold,
        norm_eps=settings.norm_eps,
        process_group=process_group,
    )
