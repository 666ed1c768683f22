"""Replace prompts whose responses all earn the same, in every reward: they add nothing to the gradient.

DAPO's dynamic sampling looks at the sum of the rewards, which may be equal where each reward differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from smopd.engine import distributed
from smopd.step.batch import Batch
from smopd.step.rewards import Rewarder, Rewards
from smopd.step.sampling import Sampler


def resample(
    sampler: Sampler,
    rewarder: Rewarder,
    step: int,
    batch: Batch,
    weights: Sequence[float],
    phase: Callable[[str], AbstractContextManager[None]],
) -> tuple[Batch, Rewards, int]:
    """Score the batch, replace groups without variance up to rollout.resample times; a collective call.

    Args:
        weights: of the rewards; one of weight 0 is ignored.
        phase: of Metrics, times parts of the step.
    Returns:
        The batch, its rewards, and how many prompts of this rank were replaced. The last attempt stays,
        whatever it earned.
    """
    options, replaced = sampler.settings.rollout, 0
    with phase("rewards"):
        rewards = rewarder.score(batch.prompts, batch.rollouts, step)
    weighted_K = torch.tensor(weights) != 0
    for attempt in range(1, options.resample + 1):
        flat = flat_groups(rewards.rewards_RK[:, weighted_K], options.group_size)
        if not int(distributed.all_reduce(torch.tensor(len(flat)))):
            break
        with phase("rollout"):
            batch = sampler.again(step, attempt, batch, flat)
        replaced += len(flat)
        with phase("rewards"):
            rows = [i * options.group_size + k for i in flat for k in range(options.group_size)]
            if rows:
                chosen = [batch.prompts[row] for row in rows], [batch.rollouts[row] for row in rows]
                rewards = rewards.replaced(rows, rewarder.score(*chosen, step, check=False))
    return batch, rewards, replaced


def flat_groups(rewards_RK: Tensor, group_size: int) -> list[int]:
    """Return the groups in which no reward differs between two scored responses."""
    rewards_GnK = rewards_RK.unflatten(0, (-1, group_size)) if len(rewards_RK) else rewards_RK[:, None]
    low_GK = rewards_GnK.nan_to_num(torch.inf).amin(1)
    high_GK = rewards_GnK.nan_to_num(-torch.inf).amax(1)
    return (low_GK >= high_GK).all(1).nonzero()[:, 0].tolist()
