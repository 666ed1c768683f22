"""A step's rollout batch on one rank: which prompts are whose, and its ragged responses as flat tensors.

The global batch of P prompts is cut into one mini-batch an update, in order, and each mini-batch is dealt out
to the ranks, so an update sees the same responses however many ranks there are.

Letters: R responses and N response tokens of this rank, in flat order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from smopd.data.prompts import Prompt
from smopd.engine.types import Rollout


@dataclass(frozen=True)
class Part:
    """This rank's share of one update's mini-batch."""

    rollouts: list[Rollout]
    responses: slice
    tokens: slice


@dataclass(frozen=True)
class Batch:
    """All of a rank's rollouts of a step; `parts` cut it by update."""

    prompts: list[Prompt]
    """One a response."""
    rollouts: list[Rollout]
    parts: list[Part]
    group_R: Tensor
    lengths_R: Tensor
    response_N: Tensor
    token_ids_N: Tensor
    rollout_logp_N: Tensor


def positions(n_prompts: int, updates: int, rank: int, world_size: int) -> list[list[int]]:
    """For each update, the positions in the global batch whose prompts this rank samples."""
    cuts = [n_prompts * u // updates for u in range(updates + 1)]
    return [list(range(cuts[u] + rank, cuts[u + 1], world_size)) for u in range(updates)]


def sample_batch(
    prompts: Sequence[Prompt],
    groups: Sequence[int],
    updates: int,
    group_size: int,
    rank: int,
    world_size: int,
    generate: Callable[[list[tuple[int, ...]], list[int]], list[Rollout]],
) -> Batch:
    """Samples this rank's share of the step's prompts.

    Args:
        prompts: the step's global batch.
        groups: one number a prompt, which keys its random draws.
        updates: mini-batches a step.
        generate: (token ids, group numbers) -> `group_size` rollouts a prompt, in order.
    """
    shares = positions(len(prompts), updates, rank, world_size)
    mine = [position for share in shares for position in share]
    rollouts = generate(
        [prompts[position].token_ids for position in mine], [groups[position] for position in mine]
    )
    parts, response, token = [], 0, 0
    for share in shares:
        members = rollouts[response : response + len(share) * group_size]
        n_tokens = sum(len(rollout.response_ids) for rollout in members)
        parts.append(Part(members, slice(response, response + len(members)), slice(token, token + n_tokens)))
        response, token = response + len(members), token + n_tokens
    lengths_R = torch.tensor([len(rollout.response_ids) for rollout in rollouts], dtype=torch.int64)
    none = torch.zeros(0, dtype=torch.int64)
    return Batch(
        prompts=[prompts[position] for position in mine for _ in range(group_size)],
        rollouts=rollouts,
        parts=parts,
        group_R=torch.tensor([rollout.group for rollout in rollouts], dtype=torch.int64),
        lengths_R=lengths_R,
        response_N=torch.arange(len(rollouts)).repeat_interleave(lengths_R),
        token_ids_N=torch.cat([none, *(rollout.response_ids for rollout in rollouts)]),
        rollout_logp_N=torch.cat([none.float(), *(rollout.logps for rollout in rollouts)]),
    )
