"""One advantage a response from several rewards: GRPO, GDPO or GD2PO by name, or the user's function."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from smopd.config.settings import Advantage
from smopd.ops import gd2po_advantages, gdpo_advantages, grpo_advantages


class Estimator(Protocol):
    def __call__(
        self,
        rewards_RK: Tensor,
        group_R: Tensor,
        *,
        weights_K: Tensor,
        lengths_R: Tensor,
        settings: Advantage,
        process_group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        """(R,) advantages and (R,) bool, whether each rollout is kept; a collective call.

        Args:
            rewards_RK: float64 on the CPU, NaN where a reward could not score.
            group_R: int64, equal for rollouts of one prompt; a group lies on one rank.
            weights_K: the priority profile.
            lengths_R: response tokens.
            process_group: of the ranks that share the batch; None is this one alone.
        """
        ...


def grpo(
    rewards_RK: Tensor, group_R: Tensor, *, weights_K: Tensor, settings: Advantage, **given: Any
) -> tuple[Tensor, Tensor]:
    adv_R = grpo_advantages(rewards_RK, group_R, weights_K=weights_K)
    return adv_R, torch.ones_like(group_R, dtype=torch.bool)


def gdpo(rewards_RK: Tensor, group_R: Tensor, *, settings: Advantage, **given: Any) -> tuple[Tensor, Tensor]:
    adv_R = gdpo_advantages(rewards_RK, group_R, whiten=_whiten(settings), **given)
    return adv_R, torch.ones_like(group_R, dtype=torch.bool)


def gd2po(rewards_RK: Tensor, group_R: Tensor, *, settings: Advantage, **given: Any) -> tuple[Tensor, Tensor]:
    options = {"whiten": _whiten(settings), "snr_threshold": settings.snr_threshold, **given}
    return gd2po_advantages(rewards_RK, group_R, **options)


def _whiten(settings: Advantage) -> str | None:
    return None if settings.whiten == "none" else settings.whiten


ESTIMATORS: dict[str, Estimator] = {"grpo": grpo, "gdpo": gdpo, "gd2po": gd2po}
