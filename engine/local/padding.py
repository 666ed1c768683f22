"""Removal of teachers' ids that only pad a vocabulary. Shapes: N tokens, S = kappa entries of one teacher."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from smopd.engine.types import Rollout

log = logging.getLogger(__name__)


class Dropping:
    """Counter of dropped vocabulary padding, which warns once."""

    vocabulary: int
    """The student's vocabulary size."""
    rows: int
    """The smallest vocabulary size of the teachers."""
    dropped = 0

    @property
    def shared(self) -> int:
        """The number of ids that the student and all teachers have in common."""
        return min(self.vocabulary, self.rows)

    def drop(self, entries: int) -> None:
        if entries > 0 and self.dropped == 0:
            log.warning("teachers: %d entries so far are vocabulary padding; their slots stay empty", entries)
        self.dropped += entries

    def inside(self, rollouts: Sequence[Rollout]) -> tuple[list[Rollout], Tensor]:
        """Clamp token ids to the teachers' vocabularies; also return (N,) bool of the clamped tokens.

        The caller sets the log-probabilities of clamped tokens to -inf.
        """
        none = torch.zeros(0, dtype=torch.int64)
        outside_N = torch.cat([none, *(r.of_policy(r.response_ids) for r in rollouts)]) >= self.rows
        if not bool(outside_N.any()):
            return list(rollouts), outside_N
        self.drop(int(outside_N.sum()))
        last = self.rows - 1
        return [replace(r, response_ids=r.response_ids.clamp(max=last)) for r in rollouts], outside_N


def without_padding(ids_NS: Tensor, logps_NS: Tensor, vocabulary: int) -> tuple[Tensor, Tensor, int]:
    """Replace ids >= `vocabulary` by empty slots, sorted last; also return their number."""
    padding_NS = ids_NS >= vocabulary
    dropped = int(padding_NS.sum())
    if dropped == 0:
        return ids_NS, logps_NS, 0
    order_NS = padding_NS.to(torch.int8).argsort(dim=-1, stable=True)
    ids_NS = ids_NS.masked_fill(padding_NS, 0).gather(-1, order_NS)
    return ids_NS, logps_NS.masked_fill(padding_NS, -torch.inf).gather(-1, order_NS), dropped
