"""The rollouts of a step on one rank, as flat tensors, and the assignment of prompts to ranks.

A step's prompts are split into one mini-batch per update, in order. Each mini-batch is distributed over the
ranks, so the content of an update does not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from smopd.data.prompts import Prompt
from smopd.engine.types import Rollout


@dataclass(frozen=True)
class MiniBatch:
    """This rank's share of one update."""

    rollouts: list[Rollout]
    responses: slice
    tokens: slice


@dataclass(frozen=True)
class Batch:
    """This rank's R responses and N policy tokens of a step, in flat order. Each update has one part."""

    prompts: list[Prompt]
    """The prompt of each response."""
    rollouts: list[Rollout]
    parts: list[MiniBatch]
    group_R: Tensor
    lengths_R: Tensor
    response_N: Tensor
    token_ids_N: Tensor
    rollout_logp_N: Tensor

    @classmethod
    def of(
        cls,
        prompts: Sequence[Prompt],
        shares: Sequence[Sequence[int]],
        rollouts: list[Rollout],
        group_size: int,
    ) -> Batch:
        """Build the batch of `prompts`. `shares` are their positions in each update, in the same order."""
        lengths = [rollout.n_tokens for rollout in rollouts]
        parts, response, token = [], 0, 0
        for share in shares:
            responses = slice(response, response + len(share) * group_size)
            tokens = slice(token, token + sum(lengths[responses]))
            parts.append(MiniBatch(rollouts[responses], responses, tokens))
            response, token = responses.stop, tokens.stop
        lengths_R = torch.tensor(lengths, dtype=torch.int64)
        none = torch.zeros(0, dtype=torch.int64)
        return cls(
            prompts=[prompt for prompt in prompts for _ in range(group_size)],
            rollouts=rollouts,
            parts=parts,
            group_R=torch.tensor([rollout.group for rollout in rollouts], dtype=torch.int64),
            lengths_R=lengths_R,
            response_N=torch.arange(len(rollouts)).repeat_interleave(lengths_R),
            token_ids_N=torch.cat([none, *(each.of_policy(each.response_ids) for each in rollouts)]),
            rollout_logp_N=torch.cat([none.float(), *(each.of_policy(each.logps) for each in rollouts)]),
        )


def positions(n_prompts: int, updates: int, rank: int, world_size: int) -> list[list[int]]:
    """Return, for each update, the positions of the prompts that this rank samples."""
    cuts = [n_prompts * u // updates for u in range(updates + 1)]
    return [list(range(cuts[u] + rank, cuts[u + 1], world_size)) for u in range(updates)]
