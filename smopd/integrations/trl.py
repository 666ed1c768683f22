"""TRL's on-policy trainers with several teachers on each token, and the fused loss.

    SMOPDDistillationTrainer    DistillationTrainer: the forward KL to the teachers' mixture (Eq. 7)
    SMOPDGRPOTrainer            GRPOTrainer: its rewards as the anchor, plus opd_coef times that KL (Eq. 9)

Both take `teacher_models`, a list of models or paths; everything else is TRL's.
Shapes: B sequences, T completion tokens, N completion tokens that count, R responses of all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from smopd.integrations.hosts import require_host, require_parameters
from smopd.ops import LossTokens, gd2po_advantages, gdpo_advantages

require_host("trl", "1.16.0", "1.17")

from trl import DistillationConfig, DistillationTrainer, GRPOConfig, GRPOTrainer  # noqa: E402

from smopd.integrations.trl_teachers import MixtureConfig, SeveralTeachers  # noqa: E402

require_parameters(DistillationTrainer._compute_loss, "unwrapped_student", "inputs", "num_items_in_batch")
require_parameters(GRPOTrainer._compute_loss, "model", "inputs")


@dataclass
class SMOPDDistillationConfig(MixtureConfig, DistillationConfig):
    """TRL's settings and the mixture's. `temperature` is both sides' in the KL, as in TRL."""

    beta: float = field(default=0.0, metadata={"help": "0, the forward KL: no other divergence is computed."})


@dataclass
class SMOPDGRPOConfig(MixtureConfig, GRPOConfig):
    """TRL's settings and the mixture's. `temperature` is the ratio's and the entropy's."""

    opd_coef: float = field(default=1.0, metadata={"help": "lambda of Eq. 9."})
    kl_temperature: float = field(default=1.0, metadata={"help": "Of both sides of the KL."})
    advantage_estimator: str = field(
        default="gdpo", metadata={"help": "gdpo or gd2po, by reward_weights; trl: TRL's own."}
    )
    whiten: str | None = field(
        default="responses", metadata={"help": "GDPO whitens over responses, tokens or (None) not."}
    )


class SMOPDDistillationTrainer(SeveralTeachers, DistillationTrainer):
    def __init__(self, model: Any, teacher_models: list[Any], args: SMOPDDistillationConfig, **options: Any):
        if args.beta != 0:
            raise ValueError(f"beta is {args.beta}, expected 0: the forward KL")
        super().__init__(model, None, args, **options)
        self.take_teachers(teacher_models, args)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
        loss = super().compute_loss(model, inputs, return_outputs, **options)
        self.log_stats(self._stats)
        return loss

    def _compute_loss(self, unwrapped_student: Any, inputs: Any, num_items_in_batch: Any) -> Any:
        seen, temperature = self.completions(inputs), self.args.temperature
        n_counted = seen.counted_BT.sum()
        denominator = n_counted.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        zero_N = torch.zeros(len(seen.token_ids_N), device=seen.token_ids_N.device)
        tokens = LossTokens(
            token_ids_N=seen.token_ids_N,
            adv_N=zero_N,
            pg_weight_N=zero_N,
            kl_weight_N=zero_N + 1 / denominator,
            **self.teachers_topk(inputs, temperature),
        )
        temperatures = {"temperature": temperature, "kl_temperature": temperature}
        loss, self._stats = self.fused(unwrapped_student, seen, tokens, opd_coef=1.0, **temperatures)
        return loss, self._stats.entropy_N.sum(), n_counted


class SMOPDGRPOTrainer(SeveralTeachers, GRPOTrainer):
    def __init__(
        self, model: Any, reward_funcs: Any, teacher_models: list[Any], args: SMOPDGRPOConfig, **options: Any
    ):
        _require_served(args)
        super().__init__(model, reward_funcs, args, **options)
        self.take_teachers(teacher_models, args)

    def _calculate_rewards(self, *rewarded: Any) -> Tensor:
        self._rewards_RK = super()._calculate_rewards(*rewarded)
        return self._rewards_RK

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        if self.args.advantage_estimator == "trl":
            return batch
        rewards_RK, mask_BT = self._rewards_RK, batch["completion_mask"]
        lengths_B = (mask_BT * batch["tool_mask"] if "tool_mask" in batch else mask_BT).sum(1)
        per_prompt = self.num_generations if self.model.training else self.num_generations_eval
        options = {
            "weights_K": self.reward_weights.to(rewards_RK.device),
            "lengths_R": self.accelerator.gather(lengths_B),
            "whiten": self.args.whiten,
        }
        group_R = torch.arange(len(rewards_RK), device=rewards_RK.device) // per_prompt
        if self.args.advantage_estimator == "gdpo":
            adv_R = gdpo_advantages(rewards_RK, group_R, **options)
        else:
            adv_R, _ = gd2po_advantages(rewards_RK, group_R, **options)
        start = self.accelerator.process_index * len(mask_BT)
        batch["advantages"] = adv_R[start : start + len(mask_BT)]
        logged = self._logs["advantages"]
        for _ in range(min(len(adv_R), len(logged))):
            logged.pop()
        logged.extend(adv_R.tolist())
        return batch

    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        seen, args, counted = self.completions(inputs), self.args, self.completions(inputs).counted_BT
        weight_BT, entropy_weight = self._token_weights(inputs, counted)
        pg_weight_BT = weight_BT * inputs.get("importance_sampling_ratio", 1.0)
        old_logp_BT = inputs.get("old_per_token_logps")
        tokens = LossTokens(
            token_ids_N=seen.token_ids_N,
            adv_N=inputs["advantages"][:, None].expand_as(counted)[counted],
            old_logp_N=None if old_logp_BT is None else old_logp_BT[counted],
            pg_weight_N=pg_weight_BT[counted],
            kl_weight_N=weight_BT[counted],
            ent_weight_N=entropy_weight.expand_as(counted)[counted],
            **self.teachers_topk(inputs, args.kl_temperature),
        )
        settings = {
            "clip_low": self.epsilon_low,
            "clip_high": self.epsilon_high,
            "dual_clip": args.delta,
            "opd_coef": args.opd_coef,
            "entropy_coef": self.entropy_coef if self._entropy_bonus_enabled else 0.0,
            "temperature": self.temperature,
            "kl_temperature": args.kl_temperature,
        }
        student = self.accelerator.unwrap_model(model)
        loss, stats = self.redirect(model, student, lambda: self.fused(student, seen, tokens, **settings))
        self.log_stats(stats, entropy=True)
        return loss

    def _token_weights(self, inputs: Any, counted_BT: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T) one over TRL's denominator of its loss_type, and () that of the entropy."""
        args, training = self.args, self.model.training
        accumulated = self.current_gradient_accumulation_steps if training else 1
        all_tokens = counted_BT.sum().clamp(min=1.0)
        if args.loss_type == "grpo":
            denominator = counted_BT.sum(1, keepdim=True).clamp(min=1.0) * len(counted_BT) * accumulated
        elif args.loss_type == "bnpo":
            denominator = all_tokens * accumulated
        elif args.loss_type == "dr_grpo":
            denominator = torch.tensor(len(counted_BT) * self.max_completion_length * accumulated)
        else:
            denominator = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
            if training:
                denominator = denominator * accumulated / args.steps_per_generation
        return counted_BT / denominator.to(counted_BT.device), 1 / (all_tokens * accumulated)


def _require_served(args: SMOPDGRPOConfig) -> None:
    """Names the settings of TRL's that have no place in the fused loss."""
    expected = {
        "loss_type": ("grpo", "bnpo", "dr_grpo", "dapo"),
        "importance_sampling_level": ("token",),
        "beta": (0.0,),
        "top_entropy_quantile": (1.0,),
        "off_policy_mask_threshold": (None,),
        "use_adaptive_entropy": (False,),
        "advantage_estimator": ("gdpo", "gd2po", "trl"),
        "whiten": ("responses", "tokens", None),
    }
    for name, served in expected.items():
        if (value := getattr(args, name)) not in served:
            raise ValueError(f"{name} is {value!r}, expected {' or '.join(map(repr, served))}")
