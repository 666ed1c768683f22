"""The operations as users write them in plain PyTorch today. torch.compile is applied to the same code."""

from __future__ import annotations

import torch
from torch import Tensor

from smopd.ops import LossSettings, LossTokens


def topk_of_logits(logits_NV: Tensor, kappa: int) -> tuple[Tensor, Tensor]:
    """Call torch.topk and logsumexp."""
    top = logits_NV.topk(kappa, dim=-1)
    return top.indices, top.values.float() - logits_NV.float().logsumexp(-1, keepdim=True)


def pooled(ids_NMS: Tensor, logps_NMS: Tensor, log_alpha: Tensor, kappa: int) -> tuple[Tensor, Tensor]:
    """Concatenate the candidates of all teachers, and keep the top kappa."""
    top = (logps_NMS + log_alpha[:, None]).flatten(1).topk(kappa, dim=-1)
    return ids_NMS.flatten(1).gather(-1, top.indices), top.values


def merged(ids_NMS: Tensor, logps_NMS: Tensor, log_alpha: Tensor, kappa: int) -> tuple[Tensor, Tensor]:
    """Compare every pair of candidates, join equal ids, and keep the top kappa."""
    pool = (logps_NMS + log_alpha[:, None]).flatten(1)
    ids = ids_NMS.flatten(1)
    same = ids[:, :, None] == ids[:, None, :]
    joined = pool[:, None, :].masked_fill(~same, -torch.inf).logsumexp(-1)
    first = same.to(torch.int8).argmax(-1) == torch.arange(ids.shape[1], device=ids.device)
    top = joined.masked_fill(~first, -torch.inf).topk(kappa, dim=-1)
    return ids.gather(-1, top.indices), top.values


def target_of(tokens: LossTokens, settings: LossSettings) -> tuple[Tensor, Tensor]:
    if tokens.teacher_ids_NMS is None:
        return tokens.target_ids_NS, tokens.target_logps_NS
    union = merged if settings.merge else pooled
    return union(tokens.teacher_ids_NMS, tokens.teacher_logps_NMS, tokens.log_alpha, settings.kappa)


def forward_kl(logq_NV: Tensor, ids_NS: Tensor, logps_NS: Tensor, tail: bool) -> Tensor:
    """Return the forward KL, (N,), to a target of distinct ids."""
    at_NS = logq_NV.gather(-1, ids_NS.long()).float()
    kl_N = (logps_NS.exp() * (logps_NS - at_NS)).sum(-1)
    if tail:
        rest_N, off_N = 1 - logps_NS.exp().sum(-1), 1 - at_NS.exp().sum(-1)
        kl_N = kl_N + rest_N * (rest_N.clamp(min=1e-12).log() - off_N.clamp(min=1e-12).log())
    return kl_N


def objective(
    logits_NV: Tensor, tokens: LossTokens, settings: LossSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and its terms at temperature 1 in fp32."""
    logq_NV = logits_NV.float().log_softmax(-1)
    logp_N = logq_NV.gather(-1, tokens.token_ids_N[:, None])[:, 0]
    surrogate_N = surrogate(logp_N, tokens, settings)
    kl_N = forward_kl(logq_NV, *target_of(tokens, settings), settings.tail)
    with torch.set_grad_enabled(settings.entropy_coef != 0.0):
        entropy_N = -(logq_NV.exp() * logq_NV).sum(-1)
    loss = (tokens.pg_weight_N * surrogate_N + settings.opd_coef * tokens.kl_weight_N * kl_N).sum()
    if settings.entropy_coef != 0.0:
        loss = loss - settings.entropy_coef * (tokens.ent_weight_N * entropy_N).sum()
    return loss, {"logp": logp_N.detach(), "kl": kl_N.detach(), "entropy": entropy_N.detach()}


def surrogate(logp_N: Tensor, tokens: LossTokens, settings: LossSettings) -> Tensor:
    ratio_N = (logp_N - tokens.old_logp_N).exp()
    clipped_N = ratio_N.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return -torch.minimum(ratio_N * tokens.adv_N, clipped_N * tokens.adv_N)


def gdpo_stacked(rewards_RK: Tensor, group_size: int, weights_K: Tensor, norm_eps: float) -> Tensor:
    """Compute advantages for adjacent groups of equal size, with a (B, G, K) view of the rewards."""
    rewards_BGK = rewards_RK.view(-1, group_size, rewards_RK.shape[1])
    centred_BGK = rewards_BGK - rewards_BGK.mean(1, keepdim=True)
    advantages_BGK = centred_BGK / (rewards_BGK.std(1, keepdim=True) + norm_eps)
    advantages_R = (advantages_BGK * weights_K).sum(-1).flatten()
    return (advantages_R - advantages_R.mean()) / (advantages_R.std() + norm_eps)
