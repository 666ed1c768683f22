"""Teachers' weights in their mixture (Eq. 18 to 21), and of their changes in a product (ours).

Letters: N response tokens, R responses, M teachers, S = kappa entries of each teacher.
"""

from __future__ import annotations

import math
from itertools import combinations

import torch
from torch import Tensor

from smopd.config.settings import Gate

CONFIDENCE_FLOOR = 0.05  # c0, as all constants here from appendix A
CONFIDENCE_EXPONENT = 1.0  # eta
FAILURE_EXPONENT = 1.0  # gamma
BLEND = 0.5  # beta
FAILURE_EPS = 1e-6  # epsilon

_FAR = 1e4
"""Nats of a token that one of the two never draws."""


def log_alpha(
    gate: Gate, ids_NMS: Tensor, logps_NMS: Tensor, failure_RM: Tensor, response_N: Tensor
) -> Tensor:
    """log of the teachers' weights: (M,) for the uniform gate, else (N, M).

    Args:
        gate: the kind and the floor phi.
        ids_NMS, logps_NMS: each teacher's top-kappa, sorted descending.
        failure_RM: Eq. 19, in [0, 1], each response on each teacher's reward.
        response_N: int64, the response that each token belongs to.
    """
    n_teachers = logps_NMS.shape[1]
    if gate.kind == "uniform":
        return torch.full((n_teachers,), -math.log(n_teachers), device=logps_NMS.device)
    confidence_NM, disagreement_N = confidence(logps_NMS), disagreement(ids_NMS)
    if gate.kind == "sequence":
        confidence_NM = _response_mean(confidence_NM, response_N, len(failure_RM))[response_N]
        disagreement_N = _response_mean(disagreement_N[:, None], response_N, len(failure_RM))[response_N, 0]
    failure_NM = failure_RM[response_N].to(confidence_NM)
    raw_NM = (confidence_NM + CONFIDENCE_FLOOR) ** CONFIDENCE_EXPONENT
    raw_NM = raw_NM * (failure_NM + FAILURE_EPS) ** FAILURE_EXPONENT / n_teachers
    alpha_NM = raw_NM / raw_NM.sum(-1, keepdim=True)
    pull_N1 = BLEND * disagreement_N[:, None]
    blended_NM = (1 - pull_N1) * alpha_NM + pull_N1 / n_teachers
    share_NM = blended_NM / blended_NM.sum(-1, keepdim=True)
    return (gate.floor + (1 - gate.floor * n_teachers) * share_NM).log()


def change_weights(gate: Gate, own: list[float] | None, log_alpha: Tensor) -> Tensor:
    """The weights of the teachers' changes in their product, shaped as log_alpha: (M,) or (N, M).

    Args:
        own: of each teacher; None: 1 each. A gate multiplies them by its weights over the uniform ones.
    """
    n_teachers = log_alpha.shape[-1]
    weights_M = log_alpha.new_tensor(own or [1.0] * n_teachers)
    return weights_M if gate.kind == "uniform" else weights_M * n_teachers * log_alpha.exp()


def path_weights(changes_NM: Tensor, response_N: Tensor, floor: float) -> Tensor:
    """(N, M) in [floor, 1]: min over the prefixes that end before the token of P_teacher / P_reference.

    Where a teacher turned away from a response it drew few like it: what it changed there is hardly trained.

    Args:
        changes_NM: log p_teacher - log p_reference of the sampled tokens, nats; responses one after another.
        response_N: int64, the response that each token belongs to.
    """
    if not len(response_N):
        return changes_NM.new_ones(changes_NM.shape)
    lengths_R = response_N.bincount()
    at_N = torch.arange(len(response_N), device=response_N.device)
    at_N = at_N - (lengths_R.cumsum(0) - lengths_R)[response_N]
    shape = (len(lengths_R), int(lengths_R.max()) + 1, changes_NM.shape[1])
    path_RTM = torch.zeros(shape, dtype=torch.float64, device=changes_NM.device)
    finite_NM = changes_NM.double().nan_to_num(nan=0.0, posinf=_FAR, neginf=-_FAR)
    path_RTM[response_N, at_N + 1] = finite_NM  # what comes before a token
    least_RTM = path_RTM.cumsum(1).cummin(1).values
    return least_RTM[response_N, at_N].exp().clamp(min=floor).to(changes_NM.dtype)


def confidence(logps_NMS: Tensor) -> Tensor:
    """Eq. 18 on the renormalised top-kappa: (N, M) in [0, 1]; kappa = 1 is certain."""
    kappa = logps_NMS.shape[-1]
    if kappa == 1:
        return torch.ones_like(logps_NMS[..., 0])
    logq_NMS = logps_NMS.log_softmax(-1)
    q_NMS = logq_NMS.exp()
    entropy_NM = -torch.where(q_NMS > 0, q_NMS * logq_NMS, 0.0).sum(-1)
    top_NM2 = q_NMS.topk(2, dim=-1).values
    return 0.5 * (1 - entropy_NM / math.log(kappa)) + 0.5 * (top_NM2[..., 0] - top_NM2[..., 1])


def disagreement(ids_NMS: Tensor) -> Tensor:
    """(N,) fraction of teacher pairs whose most likely tokens differ; 0 for one teacher."""
    top_NM = ids_NMS[..., 0]
    pairs = list(combinations(range(top_NM.shape[1]), 2))
    if not pairs:
        return torch.zeros(len(top_NM), device=ids_NMS.device)
    first, second = zip(*pairs, strict=True)
    return (top_NM[:, list(first)] != top_NM[:, list(second)]).float().mean(-1)


def failure(rewards_RM: Tensor, low_M: Tensor, high_M: Tensor) -> Tensor:
    """Eq. 19: (R, M), 1 where a response earns the least of a teacher's reward, 0 where the most.

    An unscorable reward (NaN) and a range of width 0 count as one half.
    """
    scaled_RM = ((rewards_RM - low_M) / (high_M - low_M)).clamp(0, 1)
    return (1 - scaled_RM).nan_to_num(nan=0.5)


def _response_mean(values_NX: Tensor, response_N: Tensor, n_responses: int) -> Tensor:
    sums_RX = values_NX.new_zeros(n_responses, values_NX.shape[1]).index_add_(0, response_N, values_NX)
    counts_R = values_NX.new_zeros(n_responses).index_add_(0, response_N, values_NX.new_ones(len(response_N)))
    return sums_RX / counts_R.clamp(min=1)[:, None]
