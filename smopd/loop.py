"""One run of policy optimisation, top to bottom: a teacher of stage 1, the student of stage 2, or a control.

Stage 1 is this loop without teachers and with a skewed priority profile; stage 2 has teachers and equal
weights.

Letters: B prompts, R responses, K rewards, N response tokens, M teachers, S of each one's log-probabilities.
"""

from __future__ import annotations

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
from smopd.step.held_out import evaluate_held_out
from smopd.step.rewards import Rewarder
from smopd.step.sampling import Sampler
from smopd.step.stop import Stop, Stopped
from smopd.step.teachers import TeacherScoring


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
    publish_weights(student, run.rollouts, version=start)

    with (
        run.stop.postponed(),
        distributed.waiting_at_most(settings.waiting_seconds),
        Sampler(settings, run.prompts, run.rollouts, student.device, ahead) as sampler,
        TeacherScoring(settings, run.teachers, run.reference, student.device) as scoring,
    ):
        for step in range(start, settings.loop.steps):
            metrics = Metrics(student.device)
            objective = Objective.at(settings, step, student.device, distils=run.teachers is not None)

            with metrics.phase("rollout"):
                batch = sampler.take(step)  # prompts (B) -> responses (R), tokens (N)
            scores_of_teachers = scoring.ask(batch, objective.coef)  # meanwhile, where they compute elsewhere
            with metrics.phase("rewards"):
                rewards = run.rewarder.score(batch.prompts, batch.rollouts, step)  # (R, K)
            with metrics.phase("old_logps"):
                old_logp_N = objective.old_logps(student, batch)  # None where the ratio is 1
            with metrics.phase("teachers"):
                scores = scores_of_teachers()  # (N, M, S)
            sampler.begin(step + 1)

            signals = objective.signals(batch, rewards.rewards_RK, old_logp_N, scores)
            adv_R, kept_R = objective.advantages(batch, rewards.rewards_RK, run.weights, signals)
            with metrics.phase("update"):
                updates = []
                for part in batch.parts:
                    tokens = objective.loss_tokens(batch, part, adv_R, signals)
                    updates.append(student.update(part.rollouts, tokens, objective.loss_settings))
            with metrics.phase("sync"):
                ahead = sampler.settle()
                publish_weights(student, run.rollouts, version=step + 1)

            result = StepResult(step + 1, objective, batch, rewards, adv_R, kept_R, scores, signals, updates)
            run.recorder.record(result, metrics)
            after(run, result, ahead)


def after(run: Run, result: StepResult, ahead: dict[str, Any] | None) -> None:
    """Token views, held-out prompts and a checkpoint (with what is begun `ahead`), each every so many
    steps; a checkpoint and the end where a signal asks for it.

    Raises:
        Stopped: it does.
    """
    settings, step = run.settings, result.step
    views = settings.log.view_every(settings.loop.steps)
    if result.signals.target is not None and due(step, views, settings):
        run.recorder.view_tokens(result, run.student)
    if run.held_out is not None and due(step, settings.evaluation.every, settings):
        greedy = evaluate_held_out(settings, run.held_out, run.rollouts, run.rewarder, greedy_only=True)
        run.recorder.evaluated(step, greedy.values)
    stopped = run.stop.asked()
    if stopped or due(step, settings.checkpoint.every, settings):
        run.recorder.flush()
        run.checkpoints.save(step, run.student, ahead)
    if stopped:
        raise Stopped(stopped, f"step {step} is done and saved", agreed=True)


def due(step: int, every: int, settings: Settings) -> bool:
    """Whether something happens after `step`: every so many, and at the end; never where `every` is 0."""
    return every > 0 and (step % every == 0 or step == settings.loop.steps)
