"""One run of policy optimisation, top to bottom: a teacher of stage 1, a student of stage 2, or a baseline.

Stage 1 is this loop without teachers and with a skewed priority profile (Eq. 4); stage 2 has teachers and
equal weights (Eq. 9).

Letters: B prompts, R responses, K rewards, N response tokens, M teachers, S of each one's log-probabilities.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from smopd.config.settings import Settings
from smopd.data.prompts import PromptSet
from smopd.engine import distributed
from smopd.engine.protocols import RolloutEngine, TeacherEngine
from smopd.engine.student.checkpoint import Checkpoints
from smopd.engine.student.student import Student
from smopd.engine.weights.sync import publish_weights
from smopd.objective import Objective
from smopd.record.metrics import Metrics
from smopd.record.recorder import Recorder, StepResult
from smopd.step.ends import RECOVERABLE
from smopd.step.held_out import evaluate_held_out
from smopd.step.rewards import Rewarder
from smopd.step.sampling import Sampler
from smopd.step.stop import Stop, Stopped
from smopd.step.teachers import TeacherScoring

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """All that one policy optimisation works with."""

    settings: Settings
    weights: list[float]
    """The priority profile, one weight a reward."""
    prompts: PromptSet
    held_out: PromptSet | None
    student: Student
    rollouts: RolloutEngine
    teachers: TeacherEngine | None
    rewarder: Rewarder
    checkpoints: Checkpoints
    recorder: Recorder
    reference: TeacherEngine | None = None
    """The policy that kl_ref holds on to."""
    stop: Stop = field(default_factory=Stop)

    @property
    def bad_answers(self) -> int | None:
        """Of the servers, to this rank, since the command began; None where no engine has servers."""
        engines = (self.rollouts, self.teachers, self.reference)
        counts = [n for engine in engines if (n := getattr(engine, "bad_answers", None)) is not None]
        return sum(counts) if counts else None


@dataclass
class Progress:
    """What a checkpoint holds beside the student."""

    step: int
    ahead: dict[str, Any] | None
    """The batch of the next step, where it is sampled already."""


def optimise(run: Run) -> None:
    """Trains `run.student` to the end of its steps, from its newest checkpoint where there is one."""
    settings, student, device = run.settings, run.student, run.student.device
    views = settings.log.view_every(settings.loop.steps)
    progress = Progress(*run.checkpoints.restore(student))
    run.recorder.begin(progress.step)
    metrics = Metrics(device)
    with metrics.phase("sync"):  # a cost of the step that samples with it
        publish_weights(student, run.rollouts, version=progress.step)

    with (
        run.stop.postponed(),
        distributed.collective_timeout(settings.waiting_seconds),
        distributed.thread("sampling", device) as sampling_thread,
        distributed.thread("teachers", device) as teachers_thread,
        saved_where_it_ends(run, progress),
    ):
        sampler = Sampler(settings, run.prompts, run.rollouts, sampling_thread, progress.ahead)
        scoring = TeacherScoring(settings, run.teachers, run.reference, device, teachers_thread)
        evaluate(run, progress.step)  # where its evaluation ended the command
        for step in range(progress.step, settings.loop.steps):
            objective = Objective.at(settings, step, device, distils=run.teachers is not None)

            with metrics.phase("rollout"):
                batch = sampler.take(step)  # prompts (B) -> responses (R), tokens (N)
            ask_teachers = scoring.ask(batch)  # they score meanwhile, where they can
            with metrics.phase("rewards"):
                rewards = run.rewarder.score(batch.prompts, batch.rollouts, step)  # (R, K)
            with metrics.phase("old_logps"):
                old_logp_N = objective.old_logps(student, batch)  # None where the ratio is 1
            with metrics.phase("teachers"):
                scores = ask_teachers()  # (N, M, S)
            sampler.begin(step + 1)

            signals = objective.signals(batch, rewards.rewards_RK, old_logp_N, scores)  # mixture: Eq. 6
            adv_R, kept_R = objective.advantages(batch, rewards.rewards_RK, run.weights)  # Eq. 1-3
            with metrics.phase("update"):
                updates = []
                for part in batch.parts:  # one optimizer step each, on Eq. 9
                    tokens = objective.loss_tokens(batch, part, adv_R, signals)
                    updates.append(student.update(part.rollouts, tokens, objective.loss_settings))

            result = StepResult(
                step=step + 1,
                objective=objective,
                batch=batch,
                rewards=rewards,
                adv_R=adv_R,
                kept_R=kept_R,
                scores=scores,
                signals=signals,
                updates=updates,
                bad_answers=run.bad_answers,
            )
            run.recorder.record(result, metrics)
            progress.step, progress.ahead = step + 1, None
            metrics = Metrics(device)
            with metrics.phase("sync"):
                progress.ahead = sampler.settle()
                publish_weights(student, run.rollouts, version=progress.step)

            if signals.target is not None and due(progress.step, views, settings):
                run.recorder.view_tokens(result, student)
            evaluate(run, progress.step)
            stopped = run.stop.asked()
            if stopped or due(progress.step, settings.checkpoint.every, settings):
                save(run, progress)
            if stopped:
                raise Stopped(stopped, f"step {progress.step} is done and saved", agreed=True)


def evaluate(run: Run, step: int) -> None:
    """The held-out prompts after `step`, every so many steps, unless that is recorded already."""
    settings = run.settings
    if run.held_out is None or step == 0 or not due(step, settings.evaluation.every, settings):
        return
    if distributed.on_rank0(lambda: run.recorder.evaluated) != step:
        greedy = evaluate_held_out(settings, run.held_out, run.rollouts, run.rewarder, greedy_only=True)
        run.recorder.record_evaluation(step, greedy.values)


def save(run: Run, progress: Progress) -> None:
    """A checkpoint of what is done; the metrics reach the disk before it."""
    run.recorder.flush()
    run.checkpoints.save(progress.step, run.student, progress.ahead)


@contextmanager
def saved_where_it_ends(run: Run, progress: Progress) -> Iterator[None]:
    """What ends the run within it, on every rank, leaves a checkpoint of what is done."""
    try:
        yield
    except RECOVERABLE:
        if progress.step > run.checkpoints.newest:
            save(run, progress)
        if progress.step and distributed.rank() == 0:
            log.warning("step %d is done and saved; rerun to resume", progress.step)
        raise


def due(step: int, every: int, settings: Settings) -> bool:
    """Whether something happens after `step`: every so many, and at the end; never where `every` is 0."""
    return every > 0 and (step % every == 0 or step == settings.loop.steps)
