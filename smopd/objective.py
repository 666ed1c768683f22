"""The objective of an update: its terms, their weights and denominators (Eq. 8 and 9).

The loss is a clipped policy gradient plus lambda times the KL to the teachers' mixture. Like the sampled
reverse KL (Eq. 17), the KL to a reference policy (`kl_ref`) has an advantage: log pi_ref - log pi_old.

Shapes: R responses and N response tokens of this rank in flat order, K rewards, M teachers.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from smopd.advantages import ESTIMATORS, least
from smopd.config.settings import Loss, Opd, Settings
from smopd.engine import distributed
from smopd.engine.errors import UserCodeError
from smopd.engine.imports import resolve
from smopd.engine.student.student import Student
from smopd.engine.types import TeacherTopK
from smopd.gates import failure, log_alpha
from smopd.ops import LossSettings, LossTokens
from smopd.step.batch import Batch, MiniBatch
from smopd.step.teachers import TeacherScores

MakesTarget = Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""(ids_NMS, logps_NMS, log_alpha, kappa) -> (ids_NS, logps_NS): the target of the forward KL.

The arguments are each teacher's top tokens in descending order, as int32 ids and log-probabilities, and the
log of the teachers' weights, (M,) or (N, M). The function returns up to 128 distinct int32 ids per position
and their float32 log-probabilities, -inf in an empty slot. It must treat each position on its own. It is
called on the student's device without gradients.
"""
MIXTURES: dict[str, MakesTarget | None] = {"pooled": None, "merged": None}
"""Built-in targets, which the fused loss computes."""


class Target(NamedTuple):
    """The teachers' scores of a batch, and their weights in the mixture."""

    topk: TeacherTopK
    log_alpha: Tensor
    """(M,) or (N, M)."""
    low_M: Tensor
    high_M: Tensor
    """Range of each teacher's reward."""
    made: tuple[Tensor, Tensor] | None = None
    """(N, S) ids and log-probabilities, or None unless opd.target is a function."""

    @property
    def logq_mix_N(self) -> Tensor:
        """Log-probabilities of the sampled tokens under the mixture (Eq. 17)."""
        return (self.log_alpha + self.topk.token_logps_NM).logsumexp(-1)


class Signals(NamedTuple):
    """Per-token inputs of the loss, except the advantages."""

    old_logp_N: Tensor | None
    """Log-probabilities before the first update, or None if not needed."""
    target: Target | None
    """The teachers' target, or None without distillation."""
    ref_log_ratio_N: Tensor | None
    """log pi_old - log pi_ref, or None without a reference policy."""


@dataclass(frozen=True)
class Objective:
    """The objective of one step."""

    settings: Settings
    """Resolved settings of the run."""
    coef: float
    """lambda."""
    device: torch.device

    @property
    def needs_old_logps(self) -> bool:
        """Whether the student's log-probabilities before the first update are needed."""
        settings, loss = self.settings, self.settings.loss
        several = settings.loop.updates_per_step > 1 and loss.old_logps == "recompute"
        reverse = self.coef > 0 and settings.opd.sampled
        return several or reverse or loss.importance_cap is not None or settings.kl_ref.coef > 0

    @property
    def reverse_scale(self) -> float:
        """Weight of the fused loss's reverse-KL term: lambda, or 1 if only kl_ref uses it."""
        return 1.0 if self.coef == 0 and self.settings.kl_ref.coef > 0 else self.coef

    @property
    def loss_settings(self) -> LossSettings:
        loss, opd = self.settings.loss, self.settings.opd
        return LossSettings(
            clip_low=loss.clip_low,
            clip_high=loss.clip_high,
            dual_clip=loss.dual_clip,
            opd_coef=self.reverse_scale,
            entropy_coef=loss.entropy_coef,
            kappa=opd.kappa,
            merge=opd.target == "merged",
            tail=opd.tail,
            temperature=self.settings.rollout.temperature,
            kl_temperature=self.settings.kl_temperature,
        )

    def old_logps(self, student: Student, batch: Batch) -> Tensor | None:
        """Return the old log-probabilities (N,), or None if not needed. This is a collective call."""
        temperature = self.settings.rollout.temperature
        return student.logps(batch.rollouts, temperature) if self.needs_old_logps else None

    def signals(
        self, batch: Batch, rewards_RK: Tensor, old_logp_N: Tensor | None, scores: TeacherScores
    ) -> Signals:
        """Return the batch's signals on the device. This is a collective call."""
        target = teacher_target(self.settings, scores.topk, batch, rewards_RK, self.device)
        ref_log_ratio_N = None
        if old_logp_N is not None and scores.ref_logp_N is not None:
            ref_log_ratio_N = old_logp_N - scores.ref_logp_N.to(old_logp_N.device)
        return Signals(old_logp_N, target, ref_log_ratio_N)

    def advantages(self, batch: Batch, rewards_RK: Tensor, weights: list[float]) -> tuple[Tensor, Tensor]:
        """Return advantages (R,), 0 if dropped, and the mask (R,) of kept ones. This is a collective call."""
        unknown = (math.nan, math.nan)
        ranges = [each.range if isinstance(each.range, tuple) else unknown for each in self.settings.rewards]
        name = self.settings.advantage.estimator
        found = resolve(name, ESTIMATORS)(
            rewards_RK.clone(),  # the estimator may change its arguments
            batch.group_R.clone(),
            weights_K=rewards_RK.new_tensor(weights),
            low_K=rewards_RK.new_tensor([low for low, _ in ranges]),
            lengths_R=batch.lengths_R.clone(),
            settings=self.settings.advantage,
            process_group=dist.group.WORLD,
        )
        zero_R = rewards_RK.new_zeros(len(rewards_RK))
        adv_R, kept_R = require_like(name, found, (zero_R, zero_R.bool()))
        return torch.where(kept_R, adv_R.detach(), 0.0), kept_R

    def loss_tokens(self, batch: Batch, part: MiniBatch, adv_R: Tensor, signals: Signals) -> LossTokens:
        """Return the inputs of the fused loss for one update. This is a collective call."""
        settings, loss, device = self.settings, self.settings.loss, self.device
        lengths_R = batch.lengths_R[part.responses]
        weight_N = token_weights(loss, lengths_R).to(device)
        rollout_logp_N = batch.rollout_logp_N[part.tokens].to(device)
        old_logp_N = None if signals.old_logp_N is None else signals.old_logp_N[part.tokens]
        sampled_weight_N = weight_N  # weight of the terms that average over sampled tokens
        if loss.importance_cap is not None:
            assert old_logp_N is not None  # because needs_old_logps is True
            importance_N = (old_logp_N - rollout_logp_N).exp()
            sampled_weight_N = weight_N * importance_N.clamp(max=loss.importance_cap)
        ratio_logp_N = old_logp_N
        if loss.old_logps == "rollout":
            ratio_logp_N = rollout_logp_N
        elif settings.loop.updates_per_step == 1:
            ratio_logp_N = None
        not_trained = signals.target is not None and (settings.opd.sampled or self.coef == 0)
        return LossTokens(
            token_ids_N=batch.token_ids_N[part.tokens].to(device),
            adv_N=adv_R[part.responses].float().repeat_interleave(lengths_R).to(device),
            old_logp_N=ratio_logp_N,
            pg_weight_N=loss.anchor_coef * sampled_weight_N,
            kl_weight_N=torch.zeros_like(weight_N) if not_trained else weight_N,
            ent_weight_N=weight_N,
            **_teachers(signals.target, part),
            **self._reverse_term(part, signals, sampled_weight_N),
        )

    def _reverse_term(self, part: MiniBatch, signals: Signals, weight_N: Tensor) -> dict[str, Tensor | None]:
        """Combine the sampled reverse KLs to the mixture and to the reference in one clipped term."""
        settings, target = self.settings, signals.target
        reverse_adv_N = reverse_weight_N = None
        if target is not None and settings.opd.sampled and self.coef > 0:
            assert signals.old_logp_N is not None  # because needs_old_logps is True
            reverse_adv_N = target.logq_mix_N[part.tokens] - signals.old_logp_N[part.tokens]
            reverse_weight_N = weight_N
        if signals.ref_log_ratio_N is not None:
            share = settings.kl_ref.coef / self.reverse_scale
            ref_adv_N = -signals.ref_log_ratio_N[part.tokens]
            if reverse_adv_N is None:
                reverse_adv_N, reverse_weight_N = ref_adv_N, share * weight_N
            else:
                reverse_adv_N = reverse_adv_N + share * ref_adv_N
        return {"reverse_adv_N": reverse_adv_N, "reverse_weight_N": reverse_weight_N}


def require_like(name: str, found: Any, expected: Sequence[Tensor]) -> Any:
    """Return `found`, the result of a user's function. Raise UserCodeError unless it is like `expected`.

    Shapes and devices must be equal, and torch.can_cast must allow the dtypes. NaN and infinity are errors,
    but -infinity is not: it marks an empty slot of a target.
    """

    def shown(value: Any) -> str:
        if not isinstance(value, Tensor):
            return f"{value!r:.60}"
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"

    def fits(value: Any, like: Tensor) -> bool:
        same = isinstance(value, Tensor) and (value.shape, value.device) == (like.shape, like.device)
        return same and torch.can_cast(value.dtype, like.dtype)

    values = found if isinstance(found, (tuple, list)) else (found,)
    if len(values) != len(expected) or not all(map(fits, values, expected)):
        got, wanted = (" and ".join(map(shown, each)) for each in (values, expected))
        raise UserCodeError(f"{name} returned {got}, expected {wanted}")
    if not all(bool((value.float() < math.inf).all()) for value in values):
        raise UserCodeError(f"{name} returned NaN or infinity")
    return found


def opd_coef(opd: Opd, step: int, steps: int) -> float:
    """Return lambda at `step`, counted from 0."""
    if opd.schedule == "constant":
        return opd.coef
    done = min(1.0, step / (opd.decay_steps or max(1, steps)))
    if opd.schedule == "cosine":
        done = 0.5 - 0.5 * math.cos(math.pi * done)
    return opd.coef + (opd.final_coef - opd.coef) * done


def teacher_target(
    settings: Settings, topk: TeacherTopK | None, batch: Batch, rewards_RK: Tensor, device: torch.device
) -> Target | None:
    """Return the teachers' target on `device`, or None without teachers. This is a collective call."""
    if topk is None:
        return None
    topk = TeacherTopK(**{name: value.to(device) for name, value in vars(topk).items()})
    opd, top = settings.opd, (topk.ids_NMS, topk.logps_NMS)
    response_N = batch.response_N.to(device)
    rewards_RM, low_M, high_M = teachers_rewards(settings, rewards_RK)
    weights = log_alpha(opd.gate, *top, failure(rewards_RM, low_M, high_M).to(device), response_N)
    make = resolve(opd.target, MIXTURES)
    made = None
    if make is not None:
        made = make(top[0].clone(), top[1].clone(), weights.clone(), opd.kappa)
        first = made[0] if isinstance(made, tuple) and made else None
        width = first.shape[1] if isinstance(first, Tensor) and first.dim() == 2 else opd.kappa
        like_NS = topk.logps_NMS.new_zeros(len(response_N), width)
        require_like(opd.target, made, (like_NS.int(), like_NS))
    return Target(topk, weights, low_M, high_M, made)


def teachers_rewards(settings: Settings, rewards_RK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return each teacher's reward (R, M) and its range (default: the batch's). This is a collective call."""
    names = [reward.name for reward in settings.rewards]
    columns = [names.index(teacher.reward) for teacher in settings.teachers.models]
    rewards_RM = rewards_RK[:, columns]
    low_M = distributed.all_reduce(least(rewards_RM), "min")
    high_M = -distributed.all_reduce(least(-rewards_RM), "min")
    for m, column in enumerate(columns):
        bounds = settings.rewards[column].range
        if isinstance(bounds, tuple):
            low_M[m], high_M[m] = bounds
    return rewards_RM, low_M, high_M


def token_weights(loss: Loss, lengths_R: Tensor) -> Tensor:
    """Return each token's weight (N,), 1 / denominator over all ranks. This is a collective call."""
    counts = torch.stack([lengths_R.sum(), (lengths_R > 0).sum()])
    tokens, responses = distributed.all_reduce(counts).double().clamp(min=1).unbind()
    if loss.aggregation == "token-mean":
        weight_R = (1 / tokens).expand(len(lengths_R))
    elif loss.aggregation == "seq-mean-token-mean":
        weight_R = 1 / (responses * lengths_R.clamp(min=1))
    else:
        weight_R = (1 / responses).expand(len(lengths_R))
    return weight_R.float().repeat_interleave(lengths_R)


def _teachers(target: Target | None, part: MiniBatch) -> dict[str, Tensor]:
    if target is None:
        return {}
    if target.made is not None:
        ids_NS, logps_NS = target.made
        return {"target_ids_NS": ids_NS[part.tokens], "target_logps_NS": logps_NS[part.tokens]}
    alpha = target.log_alpha
    return {
        "teacher_ids_NMS": target.topk.ids_NMS[part.tokens],
        "teacher_logps_NMS": target.topk.logps_NMS[part.tokens],
        "log_alpha": alpha[part.tokens] if alpha.dim() > 1 else alpha,
    }
