"""The fused operations of SMOPD: tensors in, tensors out, for any trainer. A light import, of torch alone.

    from smopd.ops import LossSettings, LossTokens, linear_smopd_loss

Letters in names are shapes: N packed response tokens, V vocabulary, D hidden, M teachers, S support entries
(kappa), R responses, K rewards. Logits and hidden states are bf16, fp16, fp32 or fp64; results are fp32, or
fp64 for fp64 inputs. Log-probabilities are in nats. SMOPD_BACKEND forces a backend. An id outside the
vocabulary is a ValueError on a CPU; on a GPU its row is NaN, and no other memory is touched. The functions
and what each promises stand in smopd/kernels, one file an operation.
"""

from __future__ import annotations

from smopd.kernels.ops.advantages import gd2po_advantages, gdpo_advantages, grpo_advantages
from smopd.kernels.ops.forward_kl import topk_forward_kl
from smopd.kernels.ops.linear import linear_smopd_loss
from smopd.kernels.ops.linear_topk import linear_topk_logprobs
from smopd.kernels.ops.loss import smopd_loss
from smopd.kernels.ops.mixture import teacher_mixture, teacher_product
from smopd.kernels.ops.topk import topk_logprobs
from smopd.kernels.types import (
    CLIP_DUAL,
    CLIP_HIGH,
    CLIP_LOG_RATIO,
    CLIP_LOW,
    CLIP_REVERSE_HIGH,
    CLIP_REVERSE_LOW,
    LossSettings,
    LossStats,
    LossTokens,
    Mixture,
    TopK,
)

__all__ = [
    "CLIP_DUAL",
    "CLIP_HIGH",
    "CLIP_LOG_RATIO",
    "CLIP_LOW",
    "CLIP_REVERSE_HIGH",
    "CLIP_REVERSE_LOW",
    "LossSettings",
    "LossStats",
    "LossTokens",
    "Mixture",
    "TopK",
    "gd2po_advantages",
    "gdpo_advantages",
    "grpo_advantages",
    "linear_smopd_loss",
    "linear_topk_logprobs",
    "smopd_loss",
    "teacher_mixture",
    "teacher_product",
    "topk_forward_kl",
    "topk_logprobs",
]
