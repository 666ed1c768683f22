"""A step's rollout batch on one rank: which prompts are whose, and its ragged responses as flat tensors.

The global batch of P prompts is cut into one mini-batch an update, in order, and each mini-batch is dealt out
to the ranks, so an update sees the same responses however many ranks there are.
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
    """This rank's share of one update's mini-batch."""

    rollouts: list[Rollout]
    responses: slice
    tokens: slice


@dataclass(frozen=True)
class Batch:
    """All of a rank's R responses of a step, N tokens in flat order; `parts` cut them by update."""

    prompts: list[Prompt]
    """One a response."""
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
        """This rank's share of a step.

        Args:
            prompts: the step's global batch.
            shares: for each update, this rank's positions in it.
            rollouts: `group_size` a position, in the order of the shares.
        """
        lengths = [len(rollout.response_ids) for rollout in rollouts]
        parts, response, token = [], 0, 0
        for share in shares:
            responses = slice(response, response + len(share) * group_size)
            tokens = slice(token, token + sum(lengths[responses]))
            parts.append(MiniBatch(rollouts[responses], responses, tokens))
            response, token = responses.stop, tokens.stop
        lengths_R = torch.tensor(lengths, dtype=torch.int64)
        none = torch.zeros(0, dtype=torch.int64)
        return cls(
            prompts=[prompts[position] for share in shares for position in share for _ in range(group_size)],
            rollouts=rollouts,
            parts=parts,
            group_R=torch.tensor([rollout.group for rollout in rollouts], dtype=torch.int64),
            lengths_R=lengths_R,
            response_N=torch.arange(len(rollouts)).repeat_interleave(lengths_R),
            token_ids_N=torch.cat([none, *(rollout.response_ids for rollout in rollouts)]),
            rollout_logp_N=torch.cat([none.float(), *(rollout.logps for rollout in rollouts)]),
        )


def positions(n_prompts: int, updates: int, rank: int, world_size: int) -> list[list[int]]:
    """For each update, the positions in the global batch whose prompts this rank samples."""
    cuts = [n_prompts * u // updates for u in range(updates + 1)]
    return [list(range(cuts[u] + rank, cuts[u + 1], world_size)) for u in range(updates)]
