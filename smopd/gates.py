"""Gates: the teachers' weights in the mixture (Eq. 18 to 21).

Shapes: N response tokens, R responses, M teachers, S = kappa entries per teacher.
"""

import math

import torch
from torch import Tensor

from smopd.config.settings import Gate

CONFIDENCE_FLOOR = 0.05  # c0. All constants here are from appendix A
CONFIDENCE_EXPONENT = 1.0  # eta
FAILURE_EXPONENT = 1.0  # gamma
BLEND = 0.5  # beta
FAILURE_EPS = 1e-6  # epsilon


def log_alpha(
    gate: Gate, ids_NMS: Tensor, logps_NMS: Tensor, failure_RM: Tensor, response_N: Tensor
) -> Tensor:
    """Return the log of the teachers' weights: (M,) for the uniform gate, else (N, M).

    Args:
        ids_NMS, logps_NMS: each teacher's top kappa tokens and their log-probabilities, in descending order.
        failure_RM: the failure (Eq. 19) of each response in each teacher's reward, in [0, 1].
        response_N: int64, the index of each token's response.
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


def confidence(logps_NMS: Tensor) -> Tensor:
    """Return the confidence (Eq. 18), (N, M) in [0, 1], on the renormalized top kappa. Kappa 1 gives 1."""
    kappa = logps_NMS.shape[-1]
    if kappa == 1:
        return torch.ones_like(logps_NMS[..., 0])
    logq_NMS = logps_NMS.log_softmax(-1)
    q_NMS = logq_NMS.exp()
    entropy_NM = -torch.where(q_NMS > 0, q_NMS * logq_NMS, 0.0).sum(-1)
    top_NM2 = q_NMS.topk(2, dim=-1).values
    return 0.5 * (1 - entropy_NM / math.log(kappa)) + 0.5 * (top_NM2[..., 0] - top_NM2[..., 1])


def disagreement(ids_NMS: Tensor) -> Tensor:
    """Return the fraction of teacher pairs with different top tokens, (N,). For one teacher it is 0."""
    top_NM = ids_NMS[..., 0]
    first, second = torch.triu_indices(top_NM.shape[1], top_NM.shape[1], offset=1)
    return (top_NM[:, first] != top_NM[:, second]).float().mean(-1).nan_to_num()


def failure(rewards_RM: Tensor, low_M: Tensor, high_M: Tensor) -> Tensor:
    """Return the failure (Eq. 19), (R, M): 1 at the range's low end, 0 at its high end, 0.5 if unknown."""
    scaled_RM = ((rewards_RM - low_M) / (high_M - low_M)).clamp(0, 1)
    return (1 - scaled_RM).nan_to_num(nan=0.5)


def _response_mean(values_NX: Tensor, response_N: Tensor, n_responses: int) -> Tensor:
    sums_RX = values_NX.new_zeros(n_responses, values_NX.shape[1]).index_add_(0, response_N, values_NX)
    counts_R = values_NX.new_zeros(n_responses).index_add_(0, response_N, values_NX.new_ones(len(response_N)))
    return sums_RX / counts_R.clamp(min=1)[:, None]
