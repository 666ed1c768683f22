"""The distillation loss in verl's logits processor: a forward KL to the mixture, and verl's own, fused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from smopd.integrations.teacher_mixing import floored_forward_kl, support_forward_kl
from smopd.integrations.verl_host import ORIGINALS, losses, ulysses, worker_config

LOSS_MODE = "smopd_forward_kl"
UNCLAMPED = {"use_policy_gradient": False, "loss_max_clamp": None, "log_prob_min_clamp": None}
WHOLE_LOGITS = ("fsdp", "fsdp2", "veomni")  # strategies that do not shard the vocabulary
_read_later: StorageWeakRef | None = None  # the logits that our loss's backward will read


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
    _keep(student_logits)
    if config.strategy not in WHOLE_LOGITS:
        raise NotImplementedError(f"{LOSS_MODE} needs whole logits; strategy {config.strategy} shards them")
    # A tensor, or verl's NonTensorData, which [] unwraps and .get does not.
    temperature = data["temperature"] if "temperature" in data.keys() else 1.0  # noqa: SIM118
    temperatures = set(torch.as_tensor(temperature).to(student_logits.dtype).flatten().tolist())
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
    _keep(student_logits)
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


def _keep(logits: Tensor) -> None:
    global _read_later
    _read_later = StorageWeakRef(logits.untyped_storage())


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """verl's own, but never in place on the logits that our loss's backward has yet to read.

    flash-attn's in-place backward runs first and would leave its gradient there, unnoticed by autograd.
    """
    kept = _read_later is not None and _read_later == StorageWeakRef(logits.untyped_storage())
    return ORIGINALS["logprobs_from_logits"](logits, labels, inplace_backward=inplace_backward and not kept)


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
