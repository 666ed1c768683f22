"""Advantage estimators: each turns the rewards of a response into one advantage.

Shapes: R responses of this rank, K rewards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from smopd.ops import gd2po_advantages, gdpo_advantages, grpo_advantages

if TYPE_CHECKING:
    from smopd.config.settings import Advantage

RMS_FLOOR = 0.05
"""batch_balanced raises a smaller RMS to this, so that no weight grows by more than a factor of 20 (ours)."""
EPSILON = 1e-8
"""Avoids division by zero in SAW and DVAO. The value is from SAW's code (github.com/Zhaolutuan/SAW)."""


class Estimator(Protocol):
    def __call__(
        self,
        rewards_RK: Tensor,
        group_R: Tensor,
        *,
        weights_K: Tensor,
        low_K: Tensor,
        lengths_R: Tensor,
        settings: Advantage,
        process_group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        """Return advantages (R,) and whether each response is kept, (R,) bool. This is a collective call.

        Args:
            rewards_RK: float64 on the CPU. NaN marks a reward that could not be scored.
            group_R: int64, equal for the responses to one prompt. A group lies on one rank.
            weights_K: the run's reward weights.
            low_K: the lowest value of each reward's `range`, or NaN for a reward without a range.
            lengths_R: number of tokens of each response.
            process_group: the ranks that share the batch, or None if the whole batch is on this rank.
        """


def grpo(
    rewards_RK: Tensor, group_R: Tensor, *, weights_K: Tensor, settings: Advantage, **other: Any
) -> tuple[Tensor, Tensor]:
    adv_R = grpo_advantages(rewards_RK, group_R, weights_K=weights_K)
    return adv_R, torch.ones_like(group_R, dtype=torch.bool)


def gdpo(
    rewards_RK: Tensor, group_R: Tensor, *, settings: Advantage, low_K: Tensor | None = None, **other: Any
) -> tuple[Tensor, Tensor]:
    adv_R = gdpo_advantages(rewards_RK, group_R, whiten=_whiten(settings), **other)
    return adv_R, torch.ones_like(group_R, dtype=torch.bool)


def gd2po(
    rewards_RK: Tensor, group_R: Tensor, *, settings: Advantage, low_K: Tensor, **other: Any
) -> tuple[Tensor, Tensor]:
    options = {"whiten": _whiten(settings), "snr_threshold": settings.snr_threshold, **other}
    return gd2po_advantages(rewards_RK, group_R, **options)


def batch_balanced(
    rewards_RK: Tensor, group_R: Tensor, *, weights_K: Tensor, **other: Any
) -> tuple[Tensor, Tensor]:
    """GDPO in which each reward's advantage A_k (Eq. 1) is divided by its RMS over the batch (our choice).

    A sparse reward varies within few groups, and its A_k is 0 in all other groups. With equal weights, it
    therefore adds little to GDPO's sum. Responses without a score are left out of a reward's RMS.
    """
    columns = [gdpo_advantages(reward_R1, group_R, whiten=None) for reward_R1 in rewards_RK.split(1, dim=1)]
    square_K = torch.stack(columns, 1).square().sum(0)
    square_K, scored_K = _reduced(torch.stack([square_K, (~rewards_RK.isnan()).sum(0)]), **other)
    rms_K = (square_K / scored_K.clamp(min=1)).sqrt()
    return gdpo(rewards_RK, group_R, weights_K=weights_K / rms_K.clamp(min=RMS_FLOOR), **other)


def saw(
    rewards_RK: Tensor, group_R: Tensor, *, weights_K: Tensor, low_K: Tensor, **other: Any
) -> tuple[Tensor, Tensor]:
    """SAW (arXiv 2606.07705): GDPO with weights proportional to each reward's coefficient of variation.

        w_k = K cv_k / sum_j cv_j,   cv_k = std_k / (mean_k - low_k) over the batch

    low_k is the lowest value of the reward's range, or the reward's minimum in the batch if it has no range.
    The reward weights multiply w_k. SAW's code whitens over tokens (`advantage.whiten: tokens`).
    """
    scored_RK = ~rewards_RK.isnan()
    least_K = _reduced(least(rewards_RK), "MIN", **other)
    above_RK = torch.where(scored_RK, rewards_RK - torch.where(low_K.isnan(), least_K, low_K), 0.0)
    n_K, sum_K = _reduced(torch.stack([scored_RK.sum(0), above_RK.sum(0)]), **other)
    mean_K = sum_K / n_K.clamp(min=1)
    square_K = _reduced(torch.where(scored_RK, above_RK - mean_K, 0.0).square().sum(0), **other)
    cv_K = (square_K / (n_K - 1).clamp(min=1)).sqrt() / (mean_K.abs() + EPSILON)
    weights_K = weights_K * len(cv_K) * cv_K / (cv_K.sum() + EPSILON)
    return gdpo(rewards_RK, group_R, weights_K=weights_K, **other)


def dvao(rewards_RK: Tensor, group_R: Tensor, *, weights_K: Tensor, **other: Any) -> tuple[Tensor, Tensor]:
    """DVAO (arXiv 2605.25604): in each group, a reward's advantage is weighted by its sigma_k.

        A = sum_k v_k A_k,   v_k = w_k sigma_k / sum_j |w_j| sigma_j

    sigma_k is the unbiased standard deviation over the scored responses of the group. A is not whitened,
    because |A| has the same bound as |A_k|.
    """
    groups, index_R = group_R.unique(return_inverse=True)
    scored_RK = ~rewards_RK.isnan()
    least_GK = rewards_RK.new_full((len(groups), len(weights_K)), torch.inf)
    at_RK = index_R[:, None].expand_as(rewards_RK)
    least_GK.scatter_reduce_(0, at_RK, rewards_RK.nan_to_num(nan=torch.inf), "amin")
    rewards_RK = rewards_RK - least_GK[index_R]  # equal rewards add exactly 0

    def group_mean(values_RK: Tensor, n_GK: Tensor) -> Tensor:
        sums_GK = values_RK.new_zeros(len(groups), values_RK.shape[1]).index_add(0, index_R, values_RK)
        return (sums_GK / n_GK.clamp(min=1))[index_R]

    n_GK = rewards_RK.new_zeros(len(groups), len(weights_K)).index_add(0, index_R, scored_RK.to(rewards_RK))
    mean_RK = group_mean(rewards_RK.nan_to_num(), n_GK)
    centred_RK = torch.where(scored_RK, rewards_RK - mean_RK, 0.0)
    sigma_RK = group_mean(centred_RK.square(), n_GK - 1).sqrt()
    adv_R = centred_RK @ weights_K / (sigma_RK @ weights_K.abs() + EPSILON)
    return adv_R, torch.ones_like(group_R, dtype=torch.bool)


def least(rewards_RK: Tensor) -> Tensor:
    """Return the minimum over responses, (K,), ignoring NaN. It is infinity if there is no value."""
    filled_RK = rewards_RK.nan_to_num(nan=torch.inf)
    return torch.cat([filled_RK, filled_RK.new_full((1, filled_RK.shape[1]), torch.inf)]).amin(0)


def _reduced(
    values: Tensor, op: str = "SUM", *, process_group: dist.ProcessGroup | None, **other: Any
) -> Tensor:
    if process_group is not None:
        dist.all_reduce(values, op=getattr(dist.ReduceOp, op), group=process_group)
    return values


def _whiten(settings: Advantage) -> str | None:
    return None if settings.whiten == "none" else settings.whiten


ESTIMATORS: dict[str, Estimator] = {
    "grpo": grpo,
    "gdpo": gdpo,
    "gd2po": gd2po,
    "batch_balanced": batch_balanced,
    "saw": saw,
    "dvao": dvao,
}
