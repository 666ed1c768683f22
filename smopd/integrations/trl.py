"""TRL's on-policy trainers with several teachers per token and the fused loss.

    SMOPDDistillationTrainer    DistillationTrainer with the forward KL to the teachers' mixture (Eq. 7)
    SMOPDGRPOTrainer            GRPOTrainer plus opd_coef times that KL (Eq. 9)

Both have the argument `teacher_models`, a list of models or paths. Everything else is as in TRL.
Shapes: B sequences, T completion tokens, N trained completion tokens, R responses of all ranks, K rewards,
M teachers, S = kappa, V vocabulary, D hidden.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from logging import getLogger
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from smopd import ops
from smopd.engine.models.loading import logit_scale
from smopd.integrations.shared import batch_advantages, log_weights, require_host, require_same_tokens
from smopd.ops import LossSettings, LossStats, LossTokens

require_host("trl", "1.16.0", "1.17")

from trl import DistillationConfig, DistillationTrainer, GRPOConfig, GRPOTrainer  # noqa: E402
from trl.models import prepare_deepspeed  # noqa: E402
from trl.models.utils import _ForwardRedirection  # noqa: E402
from trl.trainer import utils  # noqa: E402

__all__ = ["SMOPDDistillationConfig", "SMOPDDistillationTrainer", "SMOPDGRPOConfig", "SMOPDGRPOTrainer"]

logger = getLogger(__name__)


def option(default: Any, text: str) -> Any:
    """Return a field with a help text for TRL's command line."""
    return field(default=default, metadata={"help": text})


@dataclass
class MixtureConfig:
    kappa: int = option(16, "Number of entries of each teacher and of their mixture.")
    merge: bool = option(True, "Merge equal ids of the teachers (Eq. 5); false pools them (Eq. 6).")
    tail: bool = option(True, "Add a bucket for all tokens outside the support: a true KL.")
    teacher_weights: list[float] | None = option(  # noqa: RUF009  a field
        None, "One per teacher, summing to 1; null: equal."
    )
    teacher_model_init_kwargs: dict[str, Any] | str | None = option(  # noqa: RUF009  a field
        None, "For teachers by path: dtype (default: the student's), revision, ..."
    )
    chunk_bytes: int | None = option(None, "Limit in bytes of the logits held at a time.")


def require_config(args: Any, kind: type[Any]) -> None:
    """Raise TypeError if `args` is not a `kind`, and ValueError if its kappa is invalid."""
    if not isinstance(args, kind):
        raise TypeError(f"args is of type {type(args).__name__}, expected {kind.__name__}")
    if not isinstance(args.kappa, int) or args.kappa < 0:
        raise ValueError(f"kappa is {args.kappa}, expected an integer of at least 0")


def require_readable(model: Any, name: str) -> None:
    """Raise ValueError unless the decoder's output and the head's weight determine the logits.

    They do not if a model is on several devices, has a prompt or head adapter, or caps its logits.
    """
    if len(devices := sorted({str(at) for at in (getattr(model, "hf_device_map", None) or {}).values()})) > 1:
        expected = "one device: load it with device_map=None, and use several GPUs by accelerate launch"
        raise ValueError(f"{name} is split by its device_map over {', '.join(devices)}, expected {expected}")
    logit_scale(model.config.get_text_config())
    adapters = getattr(model, "peft_config", {}).values()
    if any(config.is_prompt_learning for config in adapters):
        raise ValueError(f"{name} has a prompt-learning adapter, expected one of weights, such as LoRA")
    if adapters and hasattr(model.get_output_embeddings(), "base_layer"):
        raise ValueError(f"{name} has an adapter on its head, expected none there: the loss reads its weight")


def load_teacher(trainer: Any, teacher: Any) -> Any:
    """Load a teacher, check it, freeze it and prepare it with the trainer's accelerator."""
    args, own_tokens = trainer.args, vocabulary_of(trainer)
    if isinstance(teacher, str | os.PathLike):
        name = str(teacher)
        options = {"trust_remote_code": args.trust_remote_code}
        if (revision := getattr(args, "teacher_model_revision", None)) is not None:
            options["revision"] = revision
        options |= args.teacher_model_init_kwargs or {}
        shared = {key: options[key] for key in ("trust_remote_code", "revision") if key in options}
        tokenizer = AutoTokenizer.from_pretrained(teacher, **shared)
        head = trainer.model.get_output_embeddings().weight  # cast_lm_head_to_fp32 may have cast it
        own = next(p.dtype for p in trainer.model.parameters() if p.is_floating_point() and p is not head)
        loading = {"dtype": own, "device_map": None, **options}
        teacher = utils.create_model_from_path(name, AutoModelForCausalLM, **loading)
    else:
        name = teacher.name_or_path or type(teacher).__name__
        try:  # the model's folder may contain a tokenizer
            tokenizer = AutoTokenizer.from_pretrained(teacher.name_or_path or "", local_files_only=True)
        except (OSError, ValueError):
            tokenizer = None
            logger.warning(f"teacher {name} has no local tokenizer: only its vocabulary size is compared")
    if tokenizer is not None:
        require_same_tokens(own_tokens, tokenizer.get_vocab(), name, more=True)
    size, expected = teacher.config.get_text_config().vocab_size, 1 + max(own_tokens.values())
    if size < expected:
        student = f"the student's, of {expected} tokens or padded above it"
        raise ValueError(f"teacher {name} has a vocabulary of {size}, expected {student}")
    require_readable(teacher, f"teacher {name}")
    if trainer.is_deepspeed_enabled:
        prepared = prepare_deepspeed(teacher, trainer.accelerator)
    else:
        sharded = any(isinstance(each, DTensor) for each in teacher.parameters())
        place = (trainer.is_fsdp_enabled and not sharded) or None  # None: no model is moved under FSDP
        prepared = trainer.accelerator.prepare_model(teacher, device_placement=place, evaluation_mode=True)
        if place:  # with cpu_ram_efficient_loading, other ranks have loaded zeros
            for each in (*prepared.parameters(), *prepared.buffers()):
                dist.broadcast(each.detach(), 0)
    prepared.eval()  # not chained: DeepSpeed's eval() returns None
    return prepared.requires_grad_(False)


def vocabulary_of(trainer: Any) -> dict[str, int]:
    return getattr(trainer.processing_class, "tokenizer", trainer.processing_class).get_vocab()


class Completions(NamedTuple):
    """The completions of a micro-batch, and a mask of their trained tokens."""

    input_ids: Tensor
    attention_mask: Tensor
    counted_BT: Tensor
    token_ids_N: Tensor


def completions_of(inputs: dict[str, Any]) -> Completions:
    if unserved := [name for name in ("pixel_values", "image_sizes") if inputs.get(name) is not None]:
        raise ValueError(f"the batch has {unserved[0]}; expected text alone")
    ids_BT, mask_BT = inputs["completion_ids"], inputs["completion_mask"]
    counted_BT = (mask_BT * inputs["tool_mask"] if "tool_mask" in inputs else mask_BT).bool()
    input_ids = torch.cat([inputs["prompt_ids"], ids_BT], 1)
    attention_mask = torch.cat([inputs["prompt_mask"], mask_BT], 1)
    return Completions(input_ids, attention_mask, counted_BT, ids_BT[counted_BT])


class SeveralTeachers:
    """Mixin of both trainers, with M frozen teachers and the fused loss of the student's completions."""

    def take_teachers(self: Any, teachers: list[Any]) -> None:
        if not teachers and getattr(self.args, "opd_coef", 1.0) != 0.0:
            raise ValueError("teacher_models is empty, expected at least one model or path, or opd_coef=0")
        loaded = not any(isinstance(teacher, str | os.PathLike) for teacher in teachers)
        if loaded and self.args.teacher_model_init_kwargs:
            raise ValueError("teacher_model_init_kwargs is given, expected none: no teacher is a path")
        require_readable(self.model, "the student")
        weights = self.args.teacher_weights or [1 / max(1, len(teachers))] * len(teachers)
        if len(weights) != len(teachers):
            raise ValueError(f"teacher_weights is {weights}, expected {len(teachers)} numbers")
        self._log_alpha_M = log_weights(weights or [1.0])
        self.teacher_models = [load_teacher(self, teacher) for teacher in teachers]
        n_rows = self.model.config.get_text_config().vocab_size
        self._n_vocabulary = min(n_rows, 1 + max(vocabulary_of(self).values()))
        self.redirect = _ForwardRedirection()

    def teachers_topk(
        self: Any, inputs: dict[str, Any], completions: Completions, temperature: float
    ) -> dict[str, Tensor]:
        """Return the teacher fields of LossTokens. Compute them once per batch and store them in `inputs`."""
        if not self.teacher_models:
            return {}
        if "teachers_topk" not in inputs:
            topk = [self._topk(model, completions, temperature) for model in self.teacher_models]
            ids_NMS, logps_NMS = (torch.stack(list(column), 1) for column in zip(*topk, strict=True))
            entries = {"teacher_ids_NMS": ids_NMS, "teacher_logps_NMS": logps_NMS}
            inputs["teachers_topk"] = {**entries, "log_alpha": self._log_alpha_M.to(ids_NMS.device)}
        return inputs["teachers_topk"]

    @contextmanager
    def _at_head(
        self: Any, model: Any, completions: Completions, fp32_head: bool = False
    ) -> Iterator[tuple[Tensor, Tensor, Tensor | None, float]]:
        """Yield (N, D) hidden states, the head's weight (V, D) and bias (V,), and the scale of the logits.

        Weight and bias are gathered if ZeRO-3 or FSDP2 shards them. Temperature T for scaled logits is
        equivalent to temperature T / scale for the head's output. Under autocast to bf16, the dtype is bf16,
        as in TRL. Under autocast to fp16, the head stays in fp32, because the fused loss computes unscaled
        gradients in its forward pass.
        """
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        with self.accelerator.autocast():
            output = model.get_decoder()(
                input_ids=completions.input_ids, attention_mask=completions.attention_mask, use_cache=False
            )
            states_BTD = output.last_hidden_state[:, -completions.counted_BT.shape[1] - 1 : -1]
            device = states_BTD.device.type
            bf16 = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16
        dtype = torch.float32 if fp32_head else torch.bfloat16 if bf16 else states_BTD.dtype
        head = model.get_output_embeddings()
        bias = getattr(head, "bias", None)

        def whole(parameter: Tensor) -> Tensor:
            return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).to(dtype)

        hidden_ND = states_BTD[completions.counted_BT].to(dtype)
        del output, states_BTD  # freed before the loss allocates memory
        scale = logit_scale(model.config.get_text_config())
        with utils.maybe_gather_lm_head_ctx(head.weight, bias):
            yield hidden_ND, whole(head.weight), None if bias is None else whole(bias), scale

    @torch.no_grad()
    def _topk(self: Any, wrapped: Any, completions: Completions, temperature: float) -> tuple[Tensor, Tensor]:
        bare = self.accelerator.unwrap_model(wrapped)

        def inside() -> Any:
            with self._at_head(bare, completions) as (hidden_ND, weight_VD, bias_V, scale):
                kappa, limit = min(self.args.kappa, len(weight_VD)), self.args.chunk_bytes
                options = {"bias_V": bias_V, "temperature": temperature / scale, "chunk_bytes": limit}
                return ops.linear_topk_logprobs(hidden_ND, weight_VD, kappa, **options)

        topk = self.redirect(wrapped, bare, inside)
        padding = topk.ids_NS >= self._n_vocabulary
        return topk.ids_NS.masked_fill(padding, 0), topk.logps_NS.masked_fill(padding, -torch.inf)

    def fused(
        self: Any, student: Any, completions: Completions, tokens: LossTokens, **settings: Any
    ) -> tuple[Tensor, LossStats]:
        """Compute linear_smopd_loss. Call this inside the wrapper's forward, which gathers the weights."""
        args, fp32_head = self.args, getattr(self.args, "cast_lm_head_to_fp32", False)
        with self._at_head(student, completions, fp32_head) as (hidden_ND, weight_VD, bias_V, scale):
            for name in ("temperature", "kl_temperature"):
                settings[name] /= scale
            objective = LossSettings(kappa=args.kappa, merge=args.merge, tail=args.tail, **settings)
            options = {"bias_V": bias_V, "chunk_bytes": args.chunk_bytes}
            return ops.linear_smopd_loss(hidden_ND, weight_VD, tokens, objective, **options)

    def log_means(self: Any, stats: LossStats, **columns: Tensor) -> None:
        """Log means of `columns` and of the mixture's values over all ranks' tokens. Call after forward."""
        columns |= {"opd/kl": stats.kl_N, "opd/teacher_mass": stats.teacher_mass_N}
        columns["opd/student_mass"] = stats.student_mass_N
        sums = torch.stack([torch.ones_like(stats.kl_N).sum(), *(x.float().sum() for x in columns.values())])
        count, *totals = self.accelerator.reduce(sums, reduction="sum").tolist()
        self.log_values({name: total / max(count, 1.0) for name, total in zip(columns, totals, strict=True)})

    def log_values(self: Any, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._metrics["train" if self.model.training else "eval"][name].append(value)


@dataclass
class SMOPDDistillationConfig(MixtureConfig, DistillationConfig):
    """Settings of TRL and of the mixture. As in TRL, `temperature` applies to student and teachers."""

    beta: float = option(0.0, "Must be 0, the forward KL; no other divergence is computed.")


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
    "advantage_estimator": ("trl", "gdpo", "gd2po", "batch_balanced", "saw", "dvao"),
    "whiten": ("default", "responses", "tokens", None),
    "loss_type": ("grpo", "bnpo", "dr_grpo", "dapo"),
    "importance_sampling_level": ("token",),
    "beta": (0.0,),
    "top_entropy_quantile": (1.0,),
    "off_policy_mask_threshold": (None,),
    "use_adaptive_entropy": (False,),
}
ONLY_OURS = {"whiten": "default"}  # settings of SMOPD's estimators, with defaults
ONLY_TRLS = {"scale_rewards": "group", "multi_objective_aggregation": "sum_then_normalize"}


def require_served(args: Any) -> None:
    """Raise ValueError for a setting that the loss or the advantage estimator does not support."""
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
    name, whiten = trainer.args.advantage_estimator, trainer.args.whiten
    if whiten == "default":
        whiten = "tokens" if name == "gd2po" else "responses"
    weights_K = trainer.reward_weights.to(rewards_RK.device)
    lengths_R = trainer.accelerator.gather(lengths_B)
    return batch_advantages(name, rewards_RK, group_R, weights_K, lengths_R, whiten)


@dataclass
class SMOPDGRPOConfig(MixtureConfig, GRPOConfig):
    """Settings of TRL and of the mixture. `temperature` applies to the ratio and the entropy."""

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*GRPOConfig._VALID_DICT_FIELDS, "teacher_model_init_kwargs"]

    opd_coef: float = option(1.0, "lambda of Eq. 9.")
    kl_temperature: float = option(1.0, "Temperature of both sides of the KL.")
    advantage_estimator: str = option(
        "trl", "trl: TRL's own; gdpo, gd2po, batch_balanced, saw or dvao: ours."
    )
    whiten: str | None = option("default", "responses (the default), tokens (gd2po's default) or None.")


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
        """Return the loss's denominator for TRL's `loss_type`, (B, 1) or a number."""
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
        """Log TRL's metrics of the loss and the metrics of the mixture."""
        low_N, high_N = (stats.clipped_N & ops.CLIP_LOW) != 0, (stats.clipped_N & ops.CLIP_HIGH) != 0
        clips = {"low_mean": low_N, "high_mean": high_N, "region_mean": low_N | high_N}
        clips = {f"clip_ratio/{name}": column for name, column in clips.items()}
        self.log_means(stats, entropy=stats.entropy_N, **clips)

        def shares(clipped_N: Tensor) -> Tensor:
            """Return each response's share of clipped tokens, (R,). It is NaN if a response has no tokens."""
            clipped_BT = torch.zeros_like(counted_BT).masked_scatter(counted_BT, clipped_N)
            return self.accelerator.gather(clipped_BT.sum(1) / counted_BT.sum(1))

        values = {
            "clip_ratio/low_min": utils.nanmin(shares(low_N)).item(),
            "clip_ratio/high_max": utils.nanmax(shares(high_N)).item(),
            "policy_loss": self.accelerator.gather(stats.pg_loss * accumulated).nanmean().item(),
        }
        if self._entropy_bonus_enabled and self.model.training and self.accelerator.sync_gradients:
            values["entropy_coef"] = self.entropy_coef
        self.log_values(values)
