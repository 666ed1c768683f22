"""What the paper and the regime say of small worlds without running one.

Shapes: R responses, K rewards.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from smopd.ops import gdpo_advantages

GROUPS, GROUP_SIZE = 8, 4
DENSE = (0.0, 1.0, 2.0, 3.0)
SPARSE = (1.0, 0.0, 0.0, 0.0)


def figure_1a(weights: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Fig. 1(a): eight groups of four, the dense reward varying in all, the sparse one in a single group.

    Returns:
        The advantages, (8, 4) each, the group with the sparse reward first: before whitening and after.
    """
    dense_R = torch.tensor(DENSE, dtype=torch.float64).repeat(GROUPS)
    sparse_R = torch.zeros(GROUPS * GROUP_SIZE, dtype=torch.float64)
    sparse_R[:GROUP_SIZE] = torch.tensor(SPARSE, dtype=torch.float64)
    rewards_RK = torch.stack([dense_R, sparse_R], 1)
    group_R = torch.arange(GROUPS).repeat_interleave(GROUP_SIZE)
    weights_K = torch.tensor(weights, dtype=torch.float64)
    before_R = gdpo_advantages(rewards_RK, group_R, weights_K=weights_K, whiten=None, norm_eps=0.0)
    after_R = gdpo_advantages(rewards_RK, group_R, weights_K=weights_K, norm_eps=0.0)
    return before_R.view(GROUPS, -1), after_R.view(GROUPS, -1)


def mixed_groups(rate: float, group_size: int) -> float:
    """The share of groups in which a 0-or-1 reward of this rate differs: 1 - p^G - (1 - p)^G."""
    return 1.0 - rate**group_size - (1.0 - rate) ** group_size


def mixed_groups_given(successes: int, responses: int, group_size: int) -> float:
    """The expectation of the same share given how many of the responses earned 1, whatever the rate."""

    def all_alike(count: int) -> float:
        return math.comb(count, group_size) / math.comb(responses, group_size)

    return 1.0 - all_alike(successes) - all_alike(responses - successes)
