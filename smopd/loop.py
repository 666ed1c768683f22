"""The training loop of a run, which trains a teacher (stage 1), a student (stage 2) or a baseline.

Stage 1 has skewed reward weights and no teachers (Eq. 4). Stage 2 has equal weights and teachers (Eq. 9).

Shapes: B prompts, R responses, K rewards, N response tokens, M teachers, S log-probabilities per teacher.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from smopd.config.settings import Settings
from smopd.data.prompts import PromptSet
from smopd.engine import distributed
from smopd.engine.errors import NonFinite
from smopd.engine.files import CannotWrite
from smopd.engine.protocols import RolloutEngine, TeacherEngine
from smopd.engine.student.checkpoint import Checkpoints, saved_steps
from smopd.engine.student.student import Student
from smopd.engine.weights.transport import publish_weights
from smopd.objective import Objective, opd_coef
from smopd.record.metrics import Metrics, profiled
from smopd.record.recorder import Recorder, StepResult
from smopd.step.conversation import Conversations
from smopd.step.held_out import evaluate_held_out
from smopd.step.rewards import Rewarder
from smopd.step.sampling import Sampler, resample
from smopd.step.stop import RECOVERABLE, Stop, Stopped
from smopd.step.teachers import TeacherScoring

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """The components of a training run."""

    settings: Settings
    weights: list[float]
    """One weight per reward."""
    prompts: PromptSet
    held_out: PromptSet | None
    student: Student
    rollouts: RolloutEngine
    teachers: TeacherEngine | None
    rewarder: Rewarder
    checkpoints: Checkpoints
    recorder: Recorder
    reference: TeacherEngine | None = None
    """Reference policy of kl_ref."""
    views: bool = False
    """Whether to record token views."""
    conversations: Conversations | None = None
    """Conversations with the environment, or None without an environment."""
    stop: Stop = field(default_factory=Stop)

    @property
    def bad_answers(self) -> int | None:
        """Invalid answers of servers to this rank since the command began, or None without servers."""
        engines = (self.rollouts, self.teachers, self.reference)
        counts = [n for engine in engines if (n := getattr(engine, "bad_answers", None)) is not None]
        return sum(counts) if counts else None


@dataclass
class Progress:
    """The state of a run besides its student."""

    step: int
    ahead: dict[str, Any] | None
    """Batch of the next step, or None if it was not sampled ahead."""
    updates: int
    """Number of updates that the student has made by the end of `step`."""


def optimise(run: Run) -> None:
    """Train `run.student` to the last step, from the newest checkpoint if there is one."""
    settings, student, device = run.settings, run.student, run.student.device
    views = settings.log.view_every(settings.loop.steps)
    progress = Progress(*run.checkpoints.restore(student), student.updates)
    run.recorder.begin(progress.step)
    metrics = Metrics(device)
    with (
        run.stop.postponed(),
        distributed.collective_timeout(settings.waiting_seconds),
        distributed.thread("sampling", device) as sampling_thread,
        distributed.thread("teachers", device) as teachers_thread,
        profiled(run.recorder.folder, settings.log.profile, progress.step) as step_done,
        saved_where_it_ends(run, progress),
    ):
        with metrics.phase("sync"):  # this time counts for the step that samples with these weights
            publish_weights(student, run.rollouts, version=progress.step)
        sampler = Sampler(
            settings, run.prompts, run.rollouts, sampling_thread, progress.ahead, run.conversations
        )
        scoring = TeacherScoring(settings, run.teachers, run.reference, device, teachers_thread)
        evaluate(run, progress.step)  # an earlier command may have ended during this evaluation
        for step in range(progress.step, settings.loop.steps):
            coef = opd_coef(settings.opd, step, settings.loop.steps) if run.teachers is not None else 0.0
            objective = Objective(settings, coef, device)

            with metrics.phase("rollout"):
                batch = sampler.take(step)  # prompts (B) -> responses (R), tokens (N)
            rewards = None
            if settings.rollout.resample:
                batch, rewards, replaced = resample(
                    sampler, run.rewarder, step, batch, run.weights, metrics.phase
                )
                metrics.total("resampled_prompts", replaced)
            ask_teachers = scoring.ask(batch)  # in parallel if possible
            if rewards is None:
                with metrics.phase("rewards"):
                    rewards = run.rewarder.score(batch.prompts, batch.rollouts, step)  # (R, K)
            with metrics.phase("old_logps"):
                old_logp_N = objective.old_logps(student, batch)  # None if not needed
            with metrics.phase("teachers"):
                scores = ask_teachers()  # (N, M, S)
            sampler.begin(step + 1)

            signals = objective.signals(batch, rewards.rewards_RK, old_logp_N, scores)  # mixture: Eq. 6
            adv_R, kept_R = objective.advantages(batch, rewards.rewards_RK, run.weights)  # Eq. 1-3
            with metrics.phase("update"):
                updates = []
                for part in batch.parts:  # one optimizer update each (Eq. 9)
                    tokens = objective.loss_tokens(batch, part, adv_R, signals)
                    updates.append(student.update(part.rollouts, tokens, objective.loss_settings))

            if not any(update.skipped for update in updates):
                run.checkpoints.confirm()
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
            progress.step, progress.ahead, progress.updates = step + 1, None, student.updates
            metrics = Metrics(device)
            with metrics.phase("sync"):
                progress.ahead = sampler.settle()
                publish_weights(student, run.rollouts, version=progress.step)

            if run.views and due(progress.step, views, settings):
                run.recorder.view_tokens(result, student)
            evaluate(run, progress.step)
            stopped = run.stop.asked()
            if stopped or due(progress.step, settings.checkpoint.every, settings):
                save(run, progress)
            if stopped:
                raise Stopped(stopped, f"step {progress.step} is done and saved", agreed=True)
            step_done()
        run.checkpoints.confirm()


def evaluate(run: Run, step: int) -> None:
    """Evaluate on held-out prompts if an evaluation is due after `step` and not recorded yet."""
    settings = run.settings
    if run.held_out is None or step == 0 or not due(step, settings.evaluation.every, settings):
        return
    if distributed.on_rank0(lambda: run.recorder.evaluated) != step:
        greedy, _ = evaluate_held_out(
            settings, run.held_out, run.rollouts, run.rewarder, run.conversations, greedy_only=True
        )
        run.recorder.record_evaluation(step, greedy)


def save(run: Run, progress: Progress) -> None:
    """Flush the metrics, then write a checkpoint."""
    run.recorder.flush()
    run.checkpoints.save(progress.step, run.student, progress.ahead)


@contextmanager
def saved_where_it_ends(run: Run, progress: Progress) -> Iterator[None]:
    """Write a checkpoint if an error ends all ranks between updates. Add the step to a NonFinite message."""
    try:
        yield
    except NonFinite as error:
        raise NonFinite(f"{run.recorder.name}, after step {progress.step}: {error}{_advice(run)}") from error
    except CannotWrite:
        raise
    except Exception as error:
        on_every_rank = isinstance(error, RECOVERABLE) or distributed.world_size() == 1
        if not on_every_rank or run.student.updates != progress.updates:
            raise
        if progress.step > run.checkpoints.newest:
            save(run, progress)
        if progress.step and distributed.rank() == 0:
            log.warning("step %d is done and saved; rerun to resume", progress.step)
        raise


def _advice(run: Run) -> str:
    """Return a hint: the checkpoint from which a diverged run can resume."""
    folder, keep = run.checkpoints.folder, run.checkpoints.keep
    steps = saved_steps(folder)
    good = run.checkpoints.confirmed or (steps[keep - 1] if len(steps) > keep else 0)
    if good and steps[-1] > good:
        return f"; checkpoints after step {good} may have diverged, remove them from {folder} to resume there"
    return f"; the newest checkpoint is of step {steps[-1] if steps else 0}"


def due(step: int, every: int, settings: Settings) -> bool:
    """Return whether `step` is a multiple of `every` or the last step. If `every` is 0, return False."""
    return every > 0 and (step % every == 0 or step == settings.loop.steps)
