"""A few supervised steps on demonstrations, so that reinforcement begins from a policy that answers at all.

The gradient of the clipped surrogate at ratio 1 and advantage 1 is that of the negative log-likelihood, so
the student's own update is the supervised step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from smopd.config.settings import Loss, WarmStart
from smopd.data.prompts import Demonstration, batch_indices
from smopd.engine import distributed
from smopd.engine.student.student import Student
from smopd.engine.types import Rollout
from smopd.objective import token_weights
from smopd.ops import LossSettings, LossTokens
from smopd.record.files import JsonlLog
from smopd.record.progress import Progress


def warm_start(
    student: Student,
    demonstrations: Sequence[Demonstration],
    settings: WarmStart,
    seed: int,
    log: JsonlLog,
    progress: Progress | None,
) -> None:
    """Trains on the mean negative log-likelihood of the answers' tokens; a collective call."""
    for step in range(settings.steps):
        chosen = batch_indices(len(demonstrations), settings.batch_size, step, seed)
        mine = chosen[distributed.rank() :: distributed.world_size()]
        rollouts = [as_rollout(demonstrations[i], group) for group, i in enumerate(mine)]
        lengths_R = torch.tensor([len(rollout.response_ids) for rollout in rollouts], dtype=torch.int64)
        weight_N = token_weights(Loss(aggregation="token-mean"), lengths_R).to(student.device)
        none = torch.zeros(0, dtype=torch.int64)
        tokens = LossTokens(
            token_ids_N=torch.cat([none, *(rollout.response_ids for rollout in rollouts)]).to(student.device),
            adv_N=torch.ones_like(weight_N),
            pg_weight_N=weight_N,
        )
        update = student.update(rollouts, tokens, LossSettings(opd_coef=0.0))
        nll = -distributed.all_reduce((update.stats.logp_N * weight_N).sum())
        values = {"nll": float(nll), "grad_norm": update.grad_norm}
        if distributed.rank() == 0:
            log.write({"step": step + 1, **values})
            if progress is not None:
                progress.update(step + 1, values)


def as_rollout(demonstration: Demonstration, group: int) -> Rollout:
    response_ids = torch.tensor(demonstration.completion_ids, dtype=torch.int64)
    return Rollout(
        demonstration.prompt_ids, response_ids, torch.zeros(len(response_ids)), group, finished=True
    )
