"""TRL's on-policy trainers with several teachers per token and the fused loss.

    SMOPDDistillationTrainer    DistillationTrainer with the forward KL to the teachers' mixture (Eq. 7)
    SMOPDGRPOTrainer            GRPOTrainer plus opd_coef times that KL (Eq. 9)

Both take `teacher_models`, a list of models or paths; everything else is TRL's.
Shapes: B sequences, T completion tokens, N trained completion tokens, R responses of all ranks, K rewards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from smopd.integrations.shared import require_host
from smopd.ops import CLIP_HIGH, CLIP_LOW, LossStats, LossTokens, gd2po_advantages, gdpo_advantages

require_host("trl", "1.16.0", "1.17")

from trl import DistillationConfig, DistillationTrainer, GRPOConfig, GRPOTrainer  # noqa: E402
from trl.trainer.utils import nanmax, nanmin  # noqa: E402

from smopd.integrations.trl_mixture import (  # noqa: E402
    MixtureConfig,
    SeveralTeachers,
    completions_of,
    option,
    require_config,
)

__all__ = ["SMOPDDistillationConfig", "SMOPDDistillationTrainer", "SMOPDGRPOConfig", "SMOPDGRPOTrainer"]


@dataclass
class SMOPDDistillationConfig(MixtureConfig, DistillationConfig):
    """Settings of TRL and of the mixture. `temperature` applies to student and teachers, as in TRL."""

    beta: float = option(0.0, "0, the forward KL: no other divergence is computed.")


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
        completions, temperature = completions_of(inputs), self.args.temperature
        n_counted = completions.counted_BT.sum()
        denominator = n_counted.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        zero_N = torch.zeros(len(completions.token_ids_N), device=completions.token_ids_N.device)
        tokens = LossTokens(
            token_ids_N=completions.token_ids_N,
            adv_N=zero_N,
            pg_weight_N=zero_N,
            kl_weight_N=zero_N + 1 / denominator,
            **self.teachers_topk(inputs, completions, temperature),
        )
        temperatures = {"temperature": temperature, "kl_temperature": temperature}
        loss, self._stats = self.fused(unwrapped_student, completions, tokens, opd_coef=1.0, **temperatures)
        return loss, self._stats.entropy_N.sum(), n_counted


SERVED = {
    "advantage_estimator": ("trl", "gdpo", "gd2po"),
    "whiten": ("default", "responses", "tokens", None),
    "loss_type": ("grpo", "bnpo", "dr_grpo", "dapo"),
    "importance_sampling_level": ("token",),
    "beta": (0.0,),
    "top_entropy_quantile": (1.0,),
    "off_policy_mask_threshold": (None,),
    "use_adaptive_entropy": (False,),
}
ONLY_OURS = {"whiten": "default"}  # settings of gdpo and gd2po, with defaults
ONLY_TRLS = {"scale_rewards": "group", "multi_objective_aggregation": "sum_then_normalize"}


def require_served(args: Any) -> None:
    """Raise ValueError for a setting that the loss or the chosen advantages do not support."""
    for name, served in SERVED.items():
        if (value := getattr(args, name)) not in served:
            raise ValueError(f"{name} is {value!r}, expected {' or '.join(map(repr, served))}")
    chosen = args.advantage_estimator
    for name, default in (ONLY_OURS if chosen == "trl" else ONLY_TRLS).items():
        if (value := getattr(args, name)) != default:
            why = f"advantage_estimator={chosen!r} has no use for it"
            raise ValueError(f"{name} is {value!r}, expected {default!r}: {why}")
    highest = 1 + (args.epsilon if args.epsilon_high is None else args.epsilon_high)
    if args.delta is not None and args.delta <= highest:
        raise ValueError(f"delta is {args.delta}, expected None or above 1 + epsilon_high = {highest}")


def advantages_of(trainer: Any, batch: dict[str, Any], rewards_RK: Tensor) -> Tensor:
    mask_BT = batch["completion_mask"]
    lengths_B = (mask_BT * batch["tool_mask"] if "tool_mask" in batch else mask_BT).sum(1)
    per_prompt = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
    group_R = torch.arange(len(rewards_RK), device=rewards_RK.device) // per_prompt
    options: dict[str, Any] = {} if trainer.args.whiten == "default" else {"whiten": trainer.args.whiten}
    options["weights_K"] = trainer.reward_weights.to(rewards_RK.device)
    options["lengths_R"] = trainer.accelerator.gather(lengths_B)
    if trainer.args.advantage_estimator == "gdpo":
        return gdpo_advantages(rewards_RK, group_R, **options)
    return gd2po_advantages(rewards_RK, group_R, **options)[0]


@dataclass
class SMOPDGRPOConfig(MixtureConfig, GRPOConfig):
    """Settings of TRL and of the mixture. `temperature` applies to ratio and entropy."""

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*GRPOConfig._VALID_DICT_FIELDS, "teacher_model_init_kwargs"]

    opd_coef: float = option(1.0, "lambda of Eq. 9.")
    kl_temperature: float = option(1.0, "Of both sides of the KL.")
    advantage_estimator: str = option("trl", "trl: TRL's own; gdpo and gd2po use reward_weights.")
    whiten: str | None = option("default", "Over responses (gdpo's default), tokens (gd2po's) or None.")


class SMOPDGRPOTrainer(SeveralTeachers, GRPOTrainer):
    def __init__(
        self, model: Any, reward_funcs: Any, teacher_models: list[Any], args: SMOPDGRPOConfig, **options: Any
    ):
        require_config(args, SMOPDGRPOConfig)
        require_served(args)
        super().__init__(model, reward_funcs, args, **options)
        if self.aux_loss_enabled:
            expected = "0 for a mixture of experts: the fused loss has no auxiliary loss"
            raise ValueError(f"router_aux_loss_coef is {self.router_aux_loss_coef}, expected {expected}")
        self.take_teachers(teacher_models)

    def _calculate_rewards(self, *rewarded: Any) -> Tensor:
        self._rewards_RK = super()._calculate_rewards(*rewarded)
        return self._rewards_RK

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        if self.args.advantage_estimator == "trl":
            return batch
        adv_R = advantages_of(self, batch, self._rewards_RK)
        own = len(batch["advantages"])
        start = self.accelerator.process_index * own
        batch["advantages"] = adv_R[start : start + own]
        logged = self._logs["advantages"]
        for _ in range(min(len(adv_R), len(logged))):
            logged.pop()
        logged.extend(adv_R.tolist())
        return batch

    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        completions, args = completions_of(inputs), self.args
        counted_BT, old_logp_BT = completions.counted_BT, inputs.get("old_per_token_logps")
        accumulated = self.current_gradient_accumulation_steps if self.model.training else 1
        weight_BT = counted_BT / self._denominator(inputs, counted_BT, accumulated)
        pg_weight_BT = weight_BT * inputs.get("importance_sampling_ratio", 1.0)
        entropy_weight = 1 / (counted_BT.sum().clamp(min=1.0) * accumulated)
        tokens = LossTokens(
            token_ids_N=completions.token_ids_N,
            adv_N=inputs["advantages"][:, None].expand_as(counted_BT)[counted_BT],
            old_logp_N=None if old_logp_BT is None else old_logp_BT[counted_BT],
            pg_weight_N=pg_weight_BT[counted_BT],
            kl_weight_N=weight_BT[counted_BT],
            ent_weight_N=entropy_weight.expand_as(counted_BT)[counted_BT],
            **self.teachers_topk(inputs, completions, args.kl_temperature),
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
        loss, stats = self.redirect(
            model, student, lambda: self.fused(student, completions, tokens, **settings)
        )
        self._log(stats, counted_BT, 1 if args.loss_type == "dapo" else accumulated)
        return loss

    def _denominator(self, inputs: Any, counted_BT: Tensor, accumulated: int) -> Tensor | int:
        """Return the denominator of TRL's loss_type, (B, 1) or a number."""
        if self.args.loss_type == "grpo":
            return counted_BT.sum(1, keepdim=True).clamp(min=1.0) * len(counted_BT) * accumulated
        if self.args.loss_type == "bnpo":
            return counted_BT.sum().clamp(min=1.0) * accumulated
        if self.args.loss_type == "dr_grpo":
            return len(counted_BT) * self.max_completion_length * accumulated
        of_a_rank = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
        shared = accumulated / self.args.steps_per_generation if self.model.training else 1
        return (of_a_rank * shared).to(counted_BT.device)

    def _log(self, stats: LossStats, counted_BT: Tensor, accumulated: int) -> None:
        """Log TRL's metrics of the loss, and those of the mixture."""
        low_N, high_N = (stats.clipped_N & CLIP_LOW) != 0, (stats.clipped_N & CLIP_HIGH) != 0
        clips = {"low_mean": low_N, "high_mean": high_N, "region_mean": low_N | high_N}
        clips = {f"clip_ratio/{name}": column for name, column in clips.items()}
        self.log_means(stats, entropy=stats.entropy_N, **clips)

        def shares(clipped_N: Tensor) -> Tensor:
            """Return the (R,) share of each response's tokens; NaN for a response without tokens."""
            clipped_BT = torch.zeros_like(counted_BT).masked_scatter(counted_BT, clipped_N)
            return self.accelerator.gather(clipped_BT.sum(1) / counted_BT.sum(1))

        values = {
            "clip_ratio/low_min": nanmin(shares(low_N)).item(),
            "clip_ratio/high_max": nanmax(shares(high_N)).item(),
            "policy_loss": self.accelerator.gather(stats.pg_loss * accumulated).nanmean().item(),
        }
        if self._entropy_bonus_enabled and self.model.training and self.accelerator.sync_gradients:
            values["entropy_coef"] = self.entropy_coef
        self.log_values(values)
