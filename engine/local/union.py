"""Exchange of top-kappa ids between teachers, and removal of ids that only pad a vocabulary.

Shapes: N tokens, M teachers, S = kappa entries of one, U ids of the other teachers, D hidden, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from smopd.engine.types import Rollout, TeacherTopK

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


def others_ids(ids_NMS: Tensor, logps_NMS: Tensor, teacher: int) -> tuple[Tensor, Tensor]:
    """Return the other teachers' ids, (N, U) in teacher order, and a mask of those new to `teacher`.

    An id is new if it is neither among the teacher's own entries nor earlier in the row.
    """
    kappa = ids_NMS.shape[2]
    order = [teacher, *(m for m in range(ids_NMS.shape[1]) if m != teacher)]
    ids_NS = ids_NMS[:, order].flatten(1)
    empty_NS = logps_NMS[:, order].flatten(1) == -torch.inf
    sorted_NS, place_NS = ids_NS.masked_fill(empty_NS, -1).sort(dim=-1, stable=True)
    first_NS = torch.ones_like(empty_NS)
    first_NS[:, 1:] = sorted_NS[:, 1:] != sorted_NS[:, :-1]
    new_NS = torch.empty_like(first_NS).scatter_(-1, place_NS, first_NS) & ~empty_NS
    return ids_NS[:, kappa:].contiguous(), new_NS[:, kappa:]


def united(own: TeacherTopK, of_others: Mapping[int, Tensor]) -> TeacherTopK:
    """Append to each teacher's entries its (N, U) log-probabilities of the other teachers' new ids."""
    ids, logps = [], []
    for m, logps_NU in sorted(of_others.items()):
        others_NU, new_NU = others_ids(own.ids_NMS, own.logps_NMS, m)
        ids.append(torch.cat([own.ids_NMS[:, m], others_NU.masked_fill(~new_NU, 0)], 1))
        logps.append(torch.cat([own.logps_NMS[:, m], logps_NU.masked_fill(~new_NU, -torch.inf)], 1))
    return TeacherTopK(torch.stack(ids, 1), torch.stack(logps, 1), own.token_logps_NM)
