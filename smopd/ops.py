"""The fused operations of SMOPD, for any trainer. They need only torch.

    from smopd.ops import LossSettings, LossTokens, linear_smopd_loss

Name suffixes are shapes: N packed response tokens, V vocabulary, D hidden size, M teachers, S entries
(kappa), R responses, K rewards. Logits and hidden states are bf16, fp16, fp32 or fp64. Results are fp32, or
fp64 for fp64 inputs. Log-probabilities are in nats. SMOPD_BACKEND selects a backend. On a CPU, an id outside
the vocabulary raises ValueError. On a GPU, its row becomes NaN. The code is in smopd/kernels/ops.
"""

from smopd.kernels.ops.advantages import gd2po_advantages, gdpo_advantages, grpo_advantages
from smopd.kernels.ops.forward_kl import teacher_mixture, topk_forward_kl
from smopd.kernels.ops.loss import linear_smopd_loss, smopd_loss
from smopd.kernels.ops.topk import linear_topk_logprobs, topk_logprobs
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
    "CLIP_DUAL", "CLIP_HIGH", "CLIP_LOG_RATIO", "CLIP_LOW", "CLIP_REVERSE_HIGH", "CLIP_REVERSE_LOW",
    "LossSettings", "LossStats", "LossTokens", "Mixture", "TopK", "gd2po_advantages", "gdpo_advantages",
    "grpo_advantages", "linear_smopd_loss", "linear_topk_logprobs", "smopd_loss", "teacher_mixture",
    "topk_forward_kl", "topk_logprobs",
]  # fmt: skip
