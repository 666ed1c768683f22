"""One run of policy optimisation, top to bottom: a teacher of stage 1, the student of stage 2, or a control.

Stage 1 is this loop without teachers and with a skewed priority profile; stage 2 has teachers and equal
weights.

Letters: B prompts, R responses, K rewards, N response tokens, M teachers, S of each one's log-probabilities.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from smopd.config.settings import Settings
from smopd.data.prompts import PromptSet
from smopd.engine import distributed
from smopd.engine.protocols import NoServer, RolloutEngine, TeacherEngine
from smopd.engine.student.checkpoint import Checkpoints
from smopd.engine.student.student import Student
from smopd.engine.weights.sync import publish_weights
from smopd.objective import Objective
from smopd.record.metrics import Metrics
from smopd.record.recorder import Recorder, StepResult
from smopd.rewards.pool import RewardError
from smopd.step.held_out import evaluate_held_out
from smopd.step.rewards import Rewarder
from smopd.step.sampling import Sampler, StaleRollout
from smopd.step.stop import Stop, Stopped
from smopd.step.teachers import TeacherScoring

log = logging.getLogger(__name__)
ENDS = (NoServer, RewardError, StaleRollout)
"""What ends a run between two updates, with a checkpoint."""
together = partial(distributed.together, errors=ENDS)


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


def optimise(run: Run) -> None:
    """Trains `run.student` to the end of its steps, from its newest checkpoint where there is one."""
    settings, student = run.settings, run.student
    start, ahead = run.checkpoints.restore(student)
    run.recorder.begin(start)
    views = settings.log.view_every(settings.loop.steps)
    publish_weights(student, run.rollouts, version=start)

    with (
        run.stop.postponed(),
        distributed.waiting_at_most(settings.waiting_seconds),
        Sampler(settings, run.prompts, run.rollouts, student.device, ahead) as sampler,
        TeacherScoring(settings, run.teachers, run.reference, student.device) as scoring,
    ):
        with kept(run, start, ahead):
            evaluate(run, start)  # where its evaluation ended the command
        for step in range(start, settings.loop.steps):
            metrics = Metrics(student.device)
            objective = Objective.at(settings, step, student.device, distils=run.teachers is not None)

            with kept(run, step, ahead):
                with metrics.phase("rollout"):
                    batch = together(partial(sampler.take, step))  # prompts (B) -> responses (R), tokens (N)
                asked = scoring.ask(batch, objective.coef)  # where they compute elsewhere: meanwhile
                with metrics.phase("rewards"):
                    rewards = run.rewarder.score(batch.prompts, batch.rollouts, step)  # (R, K)
                with metrics.phase("old_logps"):
                    old_logp_N = objective.old_logps(student, batch)  # None where the ratio is 1
                with metrics.phase("teachers"):
                    scores = together(asked)  # (N, M, S)
            sampler.begin(step + 1)

            signals = objective.signals(batch, rewards.rewards_RK, old_logp_N, scores)
            adv_R, kept_R = objective.advantages(batch, rewards.rewards_RK, run.weights, signals)
            with metrics.phase("update"):
                updates = []
                for part in batch.parts:
                    tokens = objective.loss_tokens(batch, part, adv_R, signals)
                    updates.append(student.update(part.rollouts, tokens, objective.loss_settings))
            ahead, end = None, None
            with metrics.phase("sync"):
                try:
                    ahead = together(sampler.settle)
                    publish_weights(student, run.rollouts, version=step + 1)
                except ENDS as error:  # the step is done and is to be recorded
                    end = error

            result = StepResult(step + 1, objective, batch, rewards, adv_R, kept_R, scores, signals, updates)
            run.recorder.record(result, metrics)
            with kept(run, step + 1, ahead):
                if end is not None:
                    raise end
                if result.signals.target is not None and due(step + 1, views, settings):
                    run.recorder.view_tokens(result, student)
                evaluate(run, step + 1)
            stopped = run.stop.asked()
            if stopped or due(step + 1, settings.checkpoint.every, settings):
                save(run, step + 1, ahead)
            if stopped:
                raise Stopped(stopped, f"step {step + 1} is done and saved", agreed=True)


def evaluate(run: Run, step: int) -> None:
    """The held-out prompts after `step`, every so many steps, unless that is recorded already."""
    settings = run.settings
    if run.held_out is None or step == 0 or not due(step, settings.evaluation.every, settings):
        return
    if not distributed.on_first(lambda: run.recorder.has_evaluated(step)):
        greedy = evaluate_held_out(settings, run.held_out, run.rollouts, run.rewarder, greedy_only=True)
        run.recorder.evaluated(step, greedy.values)


def save(run: Run, step: int, ahead: dict[str, Any] | None) -> None:
    """A checkpoint of `step`, with what is begun `ahead`; the metrics reach the disk before it."""
    run.recorder.flush()
    run.checkpoints.save(step, run.student, ahead)


@contextmanager
def kept(run: Run, step: int, ahead: dict[str, Any] | None) -> Iterator[None]:
    """What ends the run within it, on every rank, leaves a checkpoint of `step`: so many are done."""
    try:
        yield
    except ENDS:
        if step > run.checkpoints.newest:
            save(run, step, ahead)
        if step and distributed.rank() == 0:
            log.warning("step %d is done and saved; the same command goes on", step)
        raise


def due(step: int, every: int, settings: Settings) -> bool:
    """Whether something happens after `step`: every so many, and at the end; never where `every` is 0."""
    return every > 0 and (step % every == 0 or step == settings.loop.steps)
