"""The objective of an update: which terms, at which weights, over which denominators (Eq. 8 and 9).

Letters: R responses and N response tokens of this rank in flat order, M teachers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from smopd.batch import Batch, Part
from smopd.config import Settings
from smopd.engine import distributed
from smopd.engine.types import TeacherTopK
from smopd.gates import failure, log_alpha
from smopd.kl_ref import in_loss
from smopd.ops import LossSettings, LossTokens
from smopd.sections import Loss, Opd


@dataclass(frozen=True)
class Target:
    """What the teachers say about a batch, and how much each is heard."""

    topk: TeacherTopK
    log_alpha: Tensor
    """(M,) or (N, M)."""
    low_M: Tensor
    high_M: Tensor
    """The range in which each teacher's reward is a success or a failure."""


def opd_coef(opd: Opd, step: int, steps: int) -> float:
    """lambda at `step` (from 0) of `steps`."""
    if opd.schedule == "constant":
        return opd.coef
    done = min(1.0, step / (opd.decay_steps or max(1, steps)))
    if opd.schedule == "cosine":
        done = 0.5 - 0.5 * math.cos(math.pi * done)
    return opd.coef + (opd.final_coef - opd.coef) * done


def loss_settings(settings: Settings, coef: float) -> LossSettings:
    loss, opd = settings.loss, settings.opd
    return LossSettings(
        clip_low=loss.clip_low,
        clip_high=loss.clip_high,
        dual_clip=loss.dual_clip,
        opd_coef=reverse_scale(settings, coef),
        entropy_coef=loss.entropy_coef,
        kappa=opd.kappa,
        merge=opd.support == "merged",
        tail=opd.tail,
        temperature=settings.rollout.temperature,
        kl_temperature=kl_temperature(settings),
        reverse_kl_surrogate=opd.reverse_kl_surrogate,
    )


def kl_temperature(settings: Settings) -> float:
    """Of teachers and student in the KL; the sampled one compares with the policy that was sampled."""
    sampled = settings.opd.divergence == "reverse_kl_sampled"
    return settings.rollout.temperature if sampled else settings.opd.temperature


def reverse_scale(settings: Settings, coef: float) -> float:
    """What the fused loss multiplies its reverse-KL term with: lambda, or 1 where only kl_ref needs it."""
    return 1.0 if coef == 0 and in_loss(settings.kl_ref) else coef


def needs_old_logps(settings: Settings, coef: float) -> bool:
    """Whether the training policy's log-probabilities are wanted before the first update of a batch.

    With one update a batch the ratio is 1 and its gradient needs no second forward.
    """
    reverse = coef > 0 and settings.opd.divergence == "reverse_kl_sampled"
    several = settings.loop.updates_per_step > 1 and settings.loss.old_logps == "recompute"
    return several or reverse or settings.loss.importance_cap is not None or settings.kl_ref.coef > 0


def teacher_target(
    settings: Settings, topk: TeacherTopK | None, batch: Batch, rewards_RK: Tensor, device: torch.device
) -> Target | None:
    """What the teachers said on the batch's tokens, with their gate, on `device`; None if not asked."""
    if topk is None:
        return None
    topk = TeacherTopK(**{name: value.to(device) for name, value in vars(topk).items()})
    own = settings.opd.kappa  # with teachers.union the others' entries stand behind a teacher's own
    rewards_RM, low_M, high_M = teachers_rewards(settings, rewards_RK)
    weights = log_alpha(
        settings.opd.gate,
        topk.ids_NMS[..., :own],
        topk.logps_NMS[..., :own],
        failure(rewards_RM, low_M, high_M).to(device),
        batch.response_N.to(device),
    )
    return Target(topk, weights, low_M, high_M)


def teachers_rewards(settings: Settings, rewards_RK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each teacher's own reward (R, M), with its range (M,) and (M,).

    Where no range is given it is that of the batch, over all ranks. A collective call.
    """
    names = [reward.name for reward in settings.rewards]
    columns = [names.index(teacher.reward) for teacher in settings.teachers.models]
    rewards_RM = rewards_RK[:, columns]
    low_M = distributed.all_reduce(_least(rewards_RM), "min")
    high_M = -distributed.all_reduce(_least(-rewards_RM), "min")
    for m, column in enumerate(columns):
        bounds = settings.rewards[column].range
        if isinstance(bounds, tuple):
            low_M[m], high_M[m] = bounds
    return rewards_RM, low_M, high_M


def token_weights(loss: Loss, lengths_R: Tensor) -> Tensor:
    """(N,) one over the denominator of the aggregation, counted over all ranks; a collective call."""
    counts = torch.stack([lengths_R.sum(), (lengths_R > 0).sum()])
    tokens, responses = distributed.all_reduce(counts).double().clamp(min=1).unbind()
    if loss.aggregation == "token-mean":
        weight_R = (1 / tokens).expand(len(lengths_R))
    elif loss.aggregation == "seq-mean-token-mean":
        weight_R = 1 / (responses * lengths_R.clamp(min=1))
    else:
        weight_R = (1 / responses).expand(len(lengths_R))
    return weight_R.float().repeat_interleave(lengths_R)


def loss_tokens(
    settings: Settings,
    batch: Batch,
    part: Part,
    adv_R: Tensor,
    old_logp_N: Tensor | None,
    target: Target | None,
    ref_log_ratio_N: Tensor | None,
    coef: float,
    device: torch.device,
) -> LossTokens:
    """The fused loss's inputs for one update; a collective call.

    Args:
        adv_R: advantages of the whole batch.
        old_logp_N: log-probabilities before the batch's first update, or None (ratio 1).
        target: of the whole batch, or None without distillation.
        ref_log_ratio_N: log pi_old - log pi_ref of the whole batch, or None without a reference policy.
        coef: lambda.
    """
    lengths_R = batch.lengths_R[part.responses]
    weight_N = token_weights(settings.loss, lengths_R).to(device)
    pg_weight_N = settings.loss.anchor_coef * weight_N
    rollout_logp_N = batch.rollout_logp_N[part.tokens].to(device)
    ratio_logp_N = None if old_logp_N is None else old_logp_N[part.tokens]
    if settings.loss.importance_cap is not None:
        assert ratio_logp_N is not None  # needs_old_logps
        importance_N = (ratio_logp_N - rollout_logp_N).exp()
        pg_weight_N = pg_weight_N * importance_N.clamp(max=settings.loss.importance_cap)
    distilled: dict[str, Tensor] = {}
    kl_weight_N = weight_N
    if target is not None:
        alpha = target.log_alpha[part.tokens] if target.log_alpha.dim() > 1 else target.log_alpha
        distilled["teacher_ids_NMS"] = target.topk.ids_NMS[part.tokens]
        distilled["teacher_logps_NMS"] = target.topk.logps_NMS[part.tokens]
        distilled["log_alpha"] = alpha
        sampled = settings.opd.divergence == "reverse_kl_sampled"
        if sampled and coef > 0:
            assert ratio_logp_N is not None  # needs_old_logps
            logq_mix_N = (alpha + target.topk.token_logps_NM[part.tokens]).logsumexp(-1)
            distilled |= {"reverse_adv_N": logq_mix_N - ratio_logp_N, "reverse_weight_N": weight_N}
        if sampled or coef == 0:  # the forward KL is only watched
            kl_weight_N = torch.zeros_like(weight_N)
    if ref_log_ratio_N is not None and in_loss(settings.kl_ref):
        share = settings.kl_ref.coef / reverse_scale(settings, coef)
        ref_adv_N = -ref_log_ratio_N[part.tokens]
        if "reverse_adv_N" in distilled:
            distilled["reverse_adv_N"] = distilled["reverse_adv_N"] + share * ref_adv_N
        else:
            distilled |= {"reverse_adv_N": ref_adv_N, "reverse_weight_N": share * weight_N}
    if settings.loss.old_logps == "rollout":
        ratio_logp_N = rollout_logp_N
    elif settings.loop.updates_per_step == 1:
        ratio_logp_N = None
    return LossTokens(
        token_ids_N=batch.token_ids_N[part.tokens].to(device),
        adv_N=adv_R[part.responses].float().repeat_interleave(lengths_R).to(device),
        old_logp_N=ratio_logp_N,
        pg_weight_N=pg_weight_N,
        kl_weight_N=kl_weight_N,
        ent_weight_N=weight_N,
        **distilled,
    )


def _least(values_RM: Tensor) -> Tensor:
    """(M,) minimum over responses, NaN left out; infinity over none."""
    filled_RM = values_RM.nan_to_num(nan=math.inf)
    return torch.cat([filled_RM, filled_RM.new_full((1, filled_RM.shape[1]), math.inf)]).amin(0)
