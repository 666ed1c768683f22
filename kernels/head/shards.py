"""A head cut over the vocabulary: which rows this rank holds, and what the ranks tell each other.

Results are the same bits on every rank: what is gathered is merged by every rank in rank order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """The rows [start, start + sizes[rank]) of a head, and its process group; without one, the whole head."""

    start: int
    sizes: tuple[int, ...]
    group: Any = None

    @property
    def n_vocab(self) -> int:
        return sum(self.sizes)

    def gather(self, local: Tensor) -> Tensor:
        """(ranks, *local.shape), in rank order."""
        if self.group is None:
            return local[None]
        local = local.contiguous()
        out = local.new_empty(len(self.sizes), *local.shape)
        dist.all_gather_into_tensor(out.flatten(0, 1), local, group=self.group)
        return out

    def sum_(self, share: Tensor) -> None:
        """share becomes the ranks' sum of it."""
        if self.group is not None:
            dist.all_reduce(share, group=self.group)


def shard_of(op: str, weight_VD: Tensor, group: Any, sizes: Sequence[int] | None) -> Shard:
    """sizes: every rank's number of rows; None: they are asked, which synchronises an accelerator.

    Raises:
        ValueError: sizes does not fit the group or this rank's weight.
    """
    n_local = weight_VD.shape[0]
    if group is None:
        if sizes is not None:
            raise ValueError(f"{op}: shard_sizes is {tuple(sizes)} without tp_group, expected None")
        return Shard(0, (n_local,))
    rank, n_ranks = dist.get_rank(group), dist.get_world_size(group)
    if sizes is None:
        told = torch.empty(n_ranks, dtype=torch.int64, device=weight_VD.device)
        dist.all_gather_into_tensor(told, told.new_full((1,), n_local), group=group)
        sizes = told.tolist()
    sizes = tuple(int(size) for size in sizes)
    if len(sizes) != n_ranks or sizes[rank] != n_local:
        raise ValueError(
            f"{op}: shard_sizes is {sizes}, expected {n_ranks} numbers with {n_local} at rank {rank} "
            f"to match weight_VD {tuple(weight_VD.shape)}"
        )
    if min(sizes) < 1:  # told to every rank, so that none waits for another
        raise ValueError(f"{op}: shard_sizes is {sizes}, expected at least 1 row at each rank")
    return Shard(sum(sizes[:rank]), sizes, group)
