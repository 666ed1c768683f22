"""One run of policy optimisation, top to bottom: a teacher of stage 1, the student of stage 2, or a control.

Stage 1 is this loop without teachers and with a skewed priority profile; stage 2 has teachers and equal
weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from smopd.advantages import advantages
from smopd.batch import Batch, sample_batch
from smopd.config import Settings
from smopd.data import PromptSet, batch_indices
from smopd.engine import distributed
from smopd.engine.checkpoint import Checkpoints
from smopd.engine.rollout import RolloutEngine
from smopd.engine.student import Student
from smopd.engine.teachers import TeacherEngine
from smopd.engine.types import Sampling
from smopd.evals.held_out import evaluate_held_out
from smopd.metrics import Metrics
from smopd.objective import loss_settings, loss_tokens, needs_old_logps, opd_coef, teacher_target
from smopd.recorder import Recorder
from smopd.scoring import Scorer


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
    scorer: Scorer
    checkpoints: Checkpoints
    recorder: Recorder


def optimise(run: Run) -> None:
    """Trains `run.student` to the end of its steps, from its newest checkpoint where there is one."""
    settings, student, steps = run.settings, run.student, run.settings.loop.steps
    start = run.checkpoints.restore(student)
    run.recorder.begin(start)
    run.rollouts.load_weights(student.weights(), version=start)

    for step in range(start, steps):
        metrics = Metrics()
        coef = opd_coef(settings.opd, step, steps) if run.teachers else 0.0

        with metrics.phase("rollout"):
            batch = sample(run, step)
        with metrics.phase("rewards"):
            scores = run.scorer.score(batch.prompts, batch.rollouts)
        adv_R, kept_R = advantages(
            settings.advantage,
            scores.rewards_RK,
            batch.group_R,
            batch.lengths_R,
            run.weights,
            dist.group.WORLD,
        )
        with metrics.phase("teachers"):
            target = teacher_target(settings, run.teachers, batch, scores.rewards_RK, coef)
        with metrics.phase("old_logps"):
            needed = needs_old_logps(settings, coef)
            old_logp_N = student.logps(batch.rollouts, settings.rollout.temperature) if needed else None
        with metrics.phase("update"):
            updates = []
            for part in batch.parts:
                tokens = loss_tokens(settings, batch, part, adv_R, old_logp_N, target, student.device)
                updates.append(student.update(part.rollouts, tokens, loss_settings(settings, coef)))
        with metrics.phase("sync"):
            run.rollouts.load_weights(student.weights(), version=step + 1)

        run.recorder.record(
            step + 1, metrics, batch, scores, adv_R, kept_R, coef, target, old_logp_N, updates
        )
        if run.held_out is not None and due(step + 1, settings.evaluation.every, steps):
            greedy = evaluate_held_out(settings, run.held_out, run.rollouts, run.scorer, greedy_only=True)
            run.recorder.evaluated(step + 1, greedy.values)
        if due(step + 1, settings.checkpoint.every, steps):
            run.checkpoints.save(step + 1, student)


def sample(run: Run, step: int) -> Batch:
    """This rank's rollouts of the step."""
    settings = run.settings
    chosen = batch_indices(len(run.prompts), settings.loop.prompts_per_step, step, settings.seed)
    sampling = Sampling(
        n=settings.rollout.group_size,
        temperature=settings.rollout.temperature,
        top_p=settings.rollout.top_p,
        max_new_tokens=settings.rollout.max_new_tokens,
        seed=settings.seed,
    )
    return sample_batch(
        [run.prompts[i] for i in chosen],
        settings.loop,
        step,
        sampling.n,
        distributed.rank(),
        distributed.world_size(),
        lambda token_ids, groups: run.rollouts.generate(token_ids, groups, sampling),
    )


def due(step: int, every: int, steps: int) -> bool:
    """Whether something happens after `step`: every so many, and at the end; never where `every` is 0."""
    return every > 0 and (step % every == 0 or step == steps)
