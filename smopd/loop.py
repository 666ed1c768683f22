"""One run of policy optimisation, top to bottom: a teacher of stage 1, the student of stage 2, or a control.

Stage 1 is this loop without teachers and with a skewed priority profile; stage 2 has teachers and equal
weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from smopd.advantages import advantages
from smopd.config import Settings
from smopd.data.prompts import PromptSet
from smopd.engine.protocols import RolloutEngine, TeacherEngine
from smopd.engine.student.checkpoint import Checkpoints
from smopd.engine.student.student import Student
from smopd.engine.weights.sync import synchronise
from smopd.evals.held_out import evaluate_held_out
from smopd.frozen import Frozen
from smopd.kl_ref import log_ratio, with_kl_reward
from smopd.metrics import Metrics
from smopd.objective import loss_settings, loss_tokens, needs_old_logps, opd_coef, teacher_target
from smopd.recorder import Recorder
from smopd.sampling import Batches
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
    reference: TeacherEngine | None = None
    """The policy that kl_ref holds on to."""


def optimise(run: Run) -> None:
    """Trains `run.student` to the end of its steps, from its newest checkpoint where there is one."""
    settings, student, steps = run.settings, run.student, run.settings.loop.steps
    start, ahead = run.checkpoints.restore(student)
    run.recorder.begin(start)
    synchronise(student, run.rollouts, version=start)

    with (
        Batches(settings, run.prompts, run.rollouts, student.device, ahead) as batches,
        Frozen(settings, run.teachers, run.reference, student.device) as frozen,
    ):
        for step in range(start, steps):
            metrics = Metrics(student.device)
            coef = opd_coef(settings.opd, step, steps) if run.teachers else 0.0

            with metrics.phase("rollout"):
                batch = batches.take(step)
            teachers_say = frozen.ask(batch, coef)
            with metrics.phase("rewards"):
                scores = run.scorer.score(batch.prompts, batch.rollouts, step)
            with metrics.phase("old_logps"):
                needed = needs_old_logps(settings, coef)
                old_logp_N = student.logps(batch.rollouts, settings.rollout.temperature) if needed else None
            with metrics.phase("teachers"):
                said = teachers_say()
            batches.begin(step + 1)
            ref_log_ratio_N = log_ratio(old_logp_N, said.ref_logp_N)
            rewards_RK, weights = with_kl_reward(
                settings.kl_ref, scores.rewards_RK, run.weights, ref_log_ratio_N, batch
            )
            adv_R, kept_R = advantages(
                settings.advantage, rewards_RK, batch.group_R, batch.lengths_R, weights, dist.group.WORLD
            )
            target = teacher_target(settings, said.topk, batch, scores.rewards_RK, student.device)
            with metrics.phase("update"):
                updates = []
                for part in batch.parts:
                    tokens = loss_tokens(
                        settings,
                        batch,
                        part,
                        adv_R,
                        old_logp_N,
                        target,
                        ref_log_ratio_N,
                        coef,
                        student.device,
                    )
                    updates.append(student.update(part.rollouts, tokens, loss_settings(settings, coef)))
            with metrics.phase("sync"):
                ahead = batches.settle()
                synchronise(student, run.rollouts, version=step + 1)

            run.recorder.record(
                step + 1, metrics, batch, scores, adv_R, kept_R, coef, said, target, old_logp_N, updates
            )
            if target is not None and due(step + 1, settings.log.view_every(steps), steps):
                run.recorder.view_tokens(step + 1, batch, target, student)
            if run.held_out is not None and due(step + 1, settings.evaluation.every, steps):
                greedy = evaluate_held_out(settings, run.held_out, run.rollouts, run.scorer, greedy_only=True)
                run.recorder.evaluated(step + 1, greedy.values)
            if due(step + 1, settings.checkpoint.every, steps):
                run.checkpoints.save(step + 1, student, ahead)


def due(step: int, every: int, steps: int) -> bool:
    """Whether something happens after `step`: every so many, and at the end; never where `every` is 0."""
    return every > 0 and (step % every == 0 or step == steps)
