"""SMOPD inside verl: all teachers on every token, a forward KL without a clamp, weighted GDPO and GD2PO.

    VERL_USE_EXTERNAL_MODULES=smopd.integrations.verl python -m verl.trainer.main_ppo ... \\
        distillation.distillation_loss.loss_mode=smopd_forward_kl algorithm.adv_estimator=smopd_gdpo

Importing this module registers those names, replaces four functions of verl and prints which. The mixture has
SmopdLossConfig's defaults, or its settings where that is the `_target_` of `distillation_loss`. verl's own
loss_mode forward_kl_topk keeps its values, but for the rounding that verl has in bf16.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

import smopd
from smopd.integrations.hosts import require_host, require_parameters
from smopd.integrations.teacher_mixing import floored_forward_kl, log_weights, support_forward_kl
from smopd.integrations.verl_advantages import ESTIMATORS, estimator
from smopd.ops import teacher_mixture

HOST_VERSION = require_host("verl", "0.9.1", "0.9.2")
core_algos = import_module("verl.trainer.ppo.core_algos")
losses = import_module("verl.trainer.distillation.losses")
fsdp_losses = import_module("verl.trainer.distillation.fsdp.losses")
ray_trainer = import_module("verl.trainer.ppo.ray_trainer")
teacher_manager = import_module("verl.experimental.teacher_loop.teacher_manager")
ulysses = import_module("verl.utils.ulysses")
worker_config = import_module("verl.workers.config")

LOSS_MODE = "smopd_forward_kl"
UNCLAMPED = {"use_policy_gradient": False, "loss_max_clamp": None, "log_prob_min_clamp": None}
WHOLE_LOGITS = ("fsdp", "fsdp2", "veomni")  # strategies that do not shard the vocabulary
ORIGINALS: dict[str, Callable[..., Any]] = {}  # verl's functions that this module replaced, by their names


@dataclass
class SmopdLossConfig(worker_config.DistillationLossConfig):  # type: ignore[name-defined]
    """verl's DistillationLossConfig with the mixture's settings; its topk is kappa.

    Attributes:
        teacher_weights: alpha by the teachers' keys, summing to 1; None: equal.
        merge: equal tokens of the teachers are one entry (Eq. 5); else they stay apart (Eq. 6).
        tail: one more bucket for all that is outside the support.
    """

    loss_mode: str = LOSS_MODE
    use_policy_gradient: bool = False
    loss_max_clamp: float | None = None
    log_prob_min_clamp: float | None = None
    teacher_weights: dict[str, float] | None = None
    merge: bool = True
    tail: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_unclamped(self)


def require_unclamped(settings: Any) -> None:
    """Raises ValueError where verl's settings would clamp the KL or make a reward of it."""
    for name, expected in {"loss_mode": LOSS_MODE, **UNCLAMPED}.items():
        if getattr(settings, name) != expected:
            raise ValueError(
                f"distillation_loss.{name} is {getattr(settings, name)!r}, expected {expected!r}: "
                f"{LOSS_MODE} is a supervised KL without a clamp"
            )


def rows(column: Tensor) -> Tensor:
    """A nested column (responses, positions, S) as this rank's rows (N, S)."""
    flat = column.values()[None]
    if ulysses.get_ulysses_sequence_parallel_world_size() > 1:
        flat = ulysses.slice_input_tensor(flat, dim=1)
    return flat[0]


def compute_topk_loss(
    config: Any, distillation_config: Any, data: Any, student_logits: Tensor, data_format: str
) -> dict[str, Tensor]:
    """In verl's logits processor: each token's forward KL to the mixture that the teacher manager sent.

    Student and teachers are both at temperature 1: verl's division of the logits by the rollout's is undone.

    Raises:
        NotImplementedError: the strategy shards the vocabulary.
        ValueError: the settings ask for a clamp, the batch has several temperatures, or a teacher names a
            token that the student does not have.
    """
    settings = distillation_config.distillation_loss
    if settings.loss_mode != LOSS_MODE:
        return ORIGINALS["compute_topk_loss"](config, distillation_config, data, student_logits, data_format)
    require_unclamped(settings)
    if config.strategy not in WHOLE_LOGITS:
        raise NotImplementedError(f"{LOSS_MODE} needs whole logits; strategy {config.strategy} shards them")
    temperatures = set(torch.as_tensor(data.get("temperature", 1.0)).flatten().tolist())
    if len(temperatures) != 1:
        raise ValueError(f"{LOSS_MODE}: temperatures are {sorted(temperatures)}, expected one for the batch")
    target = (rows(data["teacher_ids"]), rows(data["teacher_logprobs"]).float())
    undo, tail = 1.0 / temperatures.pop(), getattr(settings, "tail", True)
    kl = support_forward_kl(student_logits[0], *target, tail=tail, temperature=undo)
    return {
        "distillation_losses": kl.kl_N[None],
        "student_mass": kl.student_mass_N[None],
        "teacher_mass": kl.teacher_mass_N[None],
        "negative_share": (kl.kl_N.detach() < 0).float()[None],
    }


def compute_forward_kl_topk(
    student_logits: Tensor,
    teacher_topk_log_probs: Tensor,
    teacher_topk_ids: Tensor,
    config: Any,
    data_format: str,
) -> dict[str, Tensor]:
    """verl's forward_kl_topk with its clamp and diagnostics, without a log-softmax over the vocabulary."""
    target = (rows(teacher_topk_ids), rows(teacher_topk_log_probs).float())
    floor = config.distillation_loss.log_prob_min_clamp
    kl, overlap_N, advantage_N = floored_forward_kl(student_logits[0], *target, floor)
    return {
        "distillation_losses": kl.kl_N[None],
        "student_mass": kl.student_mass_N[None],
        "teacher_mass": kl.teacher_mass_N[None],
        "overlap_count": overlap_N[None],
        "overlap_token_advantage": advantage_N[None],
    }


def unclamped_forward_kl(
    config: Any, distillation_config: Any, model_output: dict[str, Tensor], data: Any
) -> tuple[Tensor, dict[str, Any]]:
    """The distillation loss of loss_mode smopd_forward_kl: (responses, positions), and its metrics.

    Raises:
        ValueError: verl computed the loss elsewhere than in compute_topk_loss, as its fused heads do.
    """
    if "negative_share" not in model_output:
        raise ValueError(f"{LOSS_MODE} saw no logits: set actor_rollout_ref.model.use_fused_kernels=false")
    mask = data["response_mask"]
    mask = (mask.to_padded_tensor(False) if mask.is_nested else mask).bool()
    metrics = {
        f"distillation/{name}": losses.no_padding_2_padding(model_output[name], data)[mask].mean().item()
        for name in ("student_mass", "teacher_mass", "negative_share")
    }
    return losses.no_padding_2_padding(model_output["distillation_losses"], data), metrics


async def compute_teacher_logprobs_single(
    self: Any, sequence_ids: list[int], *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """In verl's teacher manager: asks all teachers at once and returns their mixture, (positions, topk) each.

    Raises:
        ValueError: teacher_weights does not name the configured teachers, or is no distribution.
    """
    ask, settings = ORIGINALS["compute_teacher_logprobs_single"], self.distillation_loss_config
    if settings.loss_mode != LOSS_MODE:
        return await ask(self, sequence_ids, *args, **kwargs)
    keys = sorted(self.teacher_model_configs)
    weights = getattr(settings, "teacher_weights", None) or dict.fromkeys(keys, 1.0 / len(keys))
    if sorted(weights) != keys:
        raise ValueError(f"teacher_weights names {sorted(weights)}, expected the configured teachers {keys}")
    log_alpha = log_weights([weights[key] for key in keys])
    kwargs.pop("routing_key", None)
    answers = await asyncio.gather(
        *(ask(self, sequence_ids, *args, routing_key=key, **kwargs) for key in keys)
    )
    ids_NMS, logps_NMS = (torch.stack(column, dim=1) for column in zip(*answers, strict=True))
    merge = getattr(settings, "merge", True)
    mixture = teacher_mixture(ids_NMS, logps_NMS, log_alpha, settings.topk, merge=merge)
    return mixture.ids_NS, mixture.logps_NS


def compute_advantage(data: Any, adv_estimator: Any, *args: Any, **kwargs: Any) -> Any:
    """verl's own, which gives the rewards' columns to gdpo alone; here SMOPD's estimators get them too."""
    name = getattr(adv_estimator, "value", adv_estimator)
    if name not in ESTIMATORS:
        return ORIGINALS["compute_advantage"](data, adv_estimator, *args, **kwargs)
    if "response_mask" not in data.batch.keys():  # noqa: SIM118  (a TensorDict)
        data.batch["response_mask"] = ray_trainer.compute_response_mask(data)
    data.batch["advantages"], data.batch["returns"] = core_algos.get_adv_estimator_fn(name)(
        token_level_rewards=data.batch["token_level_rewards"],
        response_mask=data.batch["response_mask"],
        index=data.non_tensor_batch["uid"],
        config=kwargs.get("config"),
        non_tensor_batch=data.non_tensor_batch,
    )
    return data


def replace(owner: Any, ours: Callable[..., Any], *parameters: str) -> str:
    """Puts ours in the place of the owner's function of that name, wherever verl has imported it already."""
    name = ours.__name__
    original = getattr(owner, name)
    require_parameters(original, *parameters)
    ORIGINALS[name] = original
    setattr(owner, name, ours)
    for module in [module for key, module in sys.modules.items() if key.startswith("verl.")]:
        if vars(module).get(name) is original:
            setattr(module, name, ours)
    return f"{original.__module__}.{original.__qualname__}"


def register() -> None:
    """Registers the names, replaces verl's functions, and prints one line that says so."""
    settings = losses.DistillationLossSettings(names=[LOSS_MODE], use_topk=True)
    losses.register_distillation_loss(settings)(unclamped_forward_kl)
    for name in ESTIMATORS:
        core_algos.register_adv_est(name)(estimator(name))
    manager = teacher_manager.AsyncTeacherLLMServerManager
    topk = ("teacher_topk_log_probs", "teacher_topk_ids")
    replaced = (
        replace(losses, compute_topk_loss, "config", "distillation_config", "data", "student_logits"),
        replace(fsdp_losses, compute_forward_kl_topk, "student_logits", *topk, "config"),
        replace(manager, compute_teacher_logprobs_single, "sequence_ids", "routing_key"),
        replace(ray_trainer, compute_advantage, "data", "adv_estimator", "config"),
    )
    print(
        f"smopd {smopd.__version__} in verl {HOST_VERSION}: registered loss_mode {LOSS_MODE}, adv_estimator "
        f"{', '.join(ESTIMATORS)}; replaced {', '.join(replaced)}"
    )


register()
