"""The scores of a batch by the frozen models: the teachers and the reference policy.

They score in a thread of their own, while the rewards and the old log-probabilities are computed, where
they compute on another processor than the student: on its own the two would compete, and the collectives of
engines that share its ranks could cross.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from smopd.config.settings import Settings
from smopd.engine import distributed
from smopd.engine.protocols import TeacherEngine
from smopd.engine.types import TeacherTopK
from smopd.step.batch import Batch
from smopd.step.ends import all_or_raise


@dataclass(frozen=True)
class TeacherScores:
    """About the N response tokens of this rank."""

    topk: TeacherTopK | None
    """None where no teacher was asked."""
    ref_logp_N: Tensor | None
    """The reference policy's log-probabilities at the rollouts' temperature; None without one."""
    seconds: float
    """How long it took, waiting for it or not."""
    dropped: int
    """Entries of the teachers that only pad their vocabularies, on this rank."""


class TeacherScoring:
    """A context manager; asks one batch at a time."""

    def __init__(
        self,
        settings: Settings,
        teachers: TeacherEngine | None,
        reference: TeacherEngine | None,
        device: torch.device,
    ):
        self.settings, self.teachers, self.reference = settings, teachers, reference
        asked = [engine for engine in (teachers, reference) if engine is not None]
        self.overlaps = bool(asked) and all(engine.overlaps(device) for engine in asked)
        self._pool = distributed.thread("teachers", device)

    def __enter__(self) -> TeacherScoring:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def ask(self, batch: Batch, coef: float) -> Callable[[], TeacherScores]:
        """What gives the answer, and waits for it; the giving is a collective call.

        Args:
            coef: lambda; where it is 0 the teachers are asked only for the metrics (`opd.log_when_off`).
        """
        ask = partial(self._ask, batch, coef)
        return partial(all_or_raise, self._pool.submit(ask).result if self.overlaps else ask)

    def _ask(self, batch: Batch, coef: float) -> TeacherScores:
        begin = time.perf_counter()
        opd, sampled_at = self.settings.opd, self.settings.rollout.temperature
        topk = ref_logp_N = None
        dropped = 0
        if self.teachers is not None and (coef > 0 or opd.log_when_off):
            temperature, union = self.settings.kl_temperature, self.settings.unites
            before = self.teachers.dropped
            topk = self.teachers.score(batch.rollouts, opd.kappa, temperature, union=union)
            dropped = self.teachers.dropped - before
        if self.reference is not None:
            ref_logp_N = self.reference.score(batch.rollouts, 0, sampled_at).token_logps_NM[:, 0]
        return TeacherScores(topk, ref_logp_N, time.perf_counter() - begin, dropped)
