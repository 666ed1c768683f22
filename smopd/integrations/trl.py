"""TRL's on-policy trainers with several teachers on each token, and the fused loss.

    SMOPDDistillationTrainer    DistillationTrainer: the forward KL to the teachers' mixture (Eq. 7)
    SMOPDGRPOTrainer            GRPOTrainer: its rewards as the anchor, plus opd_coef times that KL (Eq. 9)

Both take `teacher_models`, a list of models or paths; everything else is TRL's.
Shapes: B sequences, T completion tokens, N completion tokens that count.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from smopd.integrations.hosts import require_host, require_parameters
from smopd.ops import LossTokens

require_host("trl", "1.16.0", "1.17")

from trl import DistillationConfig, DistillationTrainer, GRPOTrainer  # noqa: E402

from smopd.integrations.trl_grpo import SMOPDGRPOConfig, SMOPDGRPOTrainer  # noqa: E402
from smopd.integrations.trl_loss import SeveralTeachers, completions_of  # noqa: E402
from smopd.integrations.trl_teachers import MixtureConfig, require_config  # noqa: E402

__all__ = ["SMOPDDistillationConfig", "SMOPDDistillationTrainer", "SMOPDGRPOConfig", "SMOPDGRPOTrainer"]

require_parameters(DistillationTrainer._compute_loss, "unwrapped_student", "inputs", "num_items_in_batch")
require_parameters(GRPOTrainer._compute_loss, "model", "inputs")


@dataclass
class SMOPDDistillationConfig(MixtureConfig, DistillationConfig):
    """TRL's settings and the mixture's. `temperature` is both sides' in the KL, as in TRL."""

    beta: float = field(default=0.0, metadata={"help": "0, the forward KL: no other divergence is computed."})


class SMOPDDistillationTrainer(SeveralTeachers, DistillationTrainer):
    def __init__(self, model: Any, teacher_models: list[Any], args: SMOPDDistillationConfig, **options: Any):
        require_config(args, SMOPDDistillationConfig)
        if args.beta != 0:
            raise ValueError(f"beta is {args.beta}, expected 0: the forward KL")
        super().__init__(model, None, args, **options)
        self.take_teachers(teacher_models)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
        loss = super().compute_loss(model, inputs, return_outputs, **options)
        self.log_means(self._stats)
        return loss

    def _compute_loss(self, unwrapped_student: Any, inputs: Any, num_items_in_batch: Any) -> Any:
        seen, temperature = completions_of(inputs), self.args.temperature
        n_counted = seen.counted_BT.sum()
        denominator = n_counted.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        zero_N = torch.zeros(len(seen.token_ids_N), device=seen.token_ids_N.device)
        tokens = LossTokens(
            token_ids_N=seen.token_ids_N,
            adv_N=zero_N,
            pg_weight_N=zero_N,
            kl_weight_N=zero_N + 1 / denominator,
            **self.teachers_topk(inputs, seen, temperature),
        )
        temperatures = {"temperature": temperature, "kl_temperature": temperature}
        loss, self._stats = self.fused(unwrapped_student, seen, tokens, opd_coef=1.0, **temperatures)
        return loss, self._stats.entropy_N.sum(), n_counted
