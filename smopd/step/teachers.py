"""Score a batch with the frozen models, which are the teachers and the reference policy.

If all frozen models can run beside the student, they score in a thread, in parallel with other parts of the
step. Otherwise, they score when the step waits for them, because parallel collectives could be interleaved.
"""

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
from smopd.step.stop import all_or_raise


@dataclass(frozen=True)
class TeacherScores:
    """The frozen models' scores of this rank's N response tokens."""

    topk: TeacherTopK | None
    """None without teachers."""
    ref_logp_N: Tensor | None
    """Log-probabilities of the reference policy at the rollouts' temperature, or None without a reference."""
    seconds: float
    """Duration of the scoring, whether or not the step waited for it."""
    dropped: int
    """Number of teacher entries outside the tokenizer's vocabulary, on this rank."""


@dataclass(frozen=True)
class TeacherScoring:
    """Scores batches with the frozen models, in `thread` if they can run in parallel with the student."""

    settings: Settings
    teachers: TeacherEngine | None
    reference: TeacherEngine | None
    device: torch.device
    thread: Executor

    def ask(self, batch: Batch) -> Callable[[], TeacherScores]:
        """Return a function that waits for the scores. Calling this function is a collective call."""
        score = partial(self._score, batch)
        engines = [engine for engine in (self.teachers, self.reference) if engine is not None]
        overlaps = bool(engines) and all(engine.overlaps(self.device) for engine in engines)
        return partial(all_or_raise, self.thread.submit(score).result if overlaps else score)

    def _score(self, batch: Batch) -> TeacherScores:
        begin = time.perf_counter()
        settings = self.settings
        topk = ref_logp_N = None
        dropped = 0
        if self.teachers is not None:
            dropped = self.teachers.dropped
            topk = self.teachers.score(batch.rollouts, settings.opd.kappa, settings.kl_temperature)
            dropped = self.teachers.dropped - dropped
        if self.reference is not None:
            scored = self.reference.score(batch.rollouts, 0, settings.rollout.temperature)
            ref_logp_N = scored.token_logps_NM[:, 0]
        return TeacherScores(topk, ref_logp_N, time.perf_counter() - begin, dropped)
