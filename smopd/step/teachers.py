"""The scores of a batch by the frozen models: the teachers and the reference policy.

Where they compute on another processor than the student they score in a thread of their own, beside the
rewards and the old log-probabilities; else the two would compete, and their collectives could cross.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from smopd.config.settings import Settings
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
    """Asks the frozen models about a batch, in `thread` where they may work beside the student."""

    def __init__(
        self,
        settings: Settings,
        teachers: TeacherEngine | None,
        reference: TeacherEngine | None,
        device: torch.device,
        thread: Executor,
    ):
        self.settings, self.teachers, self.reference, self._thread = settings, teachers, reference, thread
        asked = [engine for engine in (teachers, reference) if engine is not None]
        self.overlaps = bool(asked) and all(engine.overlaps(device) for engine in asked)

    def ask(self, batch: Batch) -> Callable[[], TeacherScores]:
        """A function that waits for the scores and returns them; calling it is collective."""
        score = partial(self._score, batch)
        return partial(all_or_raise, self._thread.submit(score).result if self.overlaps else score)

    def _score(self, batch: Batch) -> TeacherScores:
        begin = time.perf_counter()
        settings = self.settings
        topk = ref_logp_N = None
        dropped = 0
        if self.teachers is not None:
            dropped = self.teachers.dropped
            topk = self.teachers.score(
                batch.rollouts, settings.opd.kappa, settings.kl_temperature, union=settings.unites
            )
            dropped = self.teachers.dropped - dropped
        if self.reference is not None:
            scored = self.reference.score(batch.rollouts, 0, settings.rollout.temperature)
            ref_logp_N = scored.token_logps_NM[:, 0]
        return TeacherScores(topk, ref_logp_N, time.perf_counter() - begin, dropped)
