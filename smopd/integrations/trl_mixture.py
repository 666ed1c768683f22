"""The frozen teachers of a TRL trainer, and the fused loss of its completions.

Shapes: B sequences, T completion tokens, N trained completion tokens, M teachers, S = kappa, V vocabulary,
D hidden.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from logging import getLogger
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.models import prepare_deepspeed
from trl.models.utils import _ForwardRedirection
from trl.trainer.utils import create_model_from_path, maybe_gather_lm_head_ctx

from smopd.engine.models.loading import logit_scale
from smopd.integrations.shared import log_weights, require_same_tokens
from smopd.ops import LossSettings, LossStats, LossTokens, linear_smopd_loss, linear_topk_logprobs

logger = getLogger(__name__)


def option(default: Any, text: str) -> Any:
    """Return a field with a help text for TRL's command line."""
    return field(default=default, metadata={"help": text})


@dataclass
class MixtureConfig:
    kappa: int = option(16, "Entries of each teacher and of their mixture.")
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
    """Raise TypeError for args of another class, and ValueError for a bad kappa."""
    if not isinstance(args, kind):
        raise TypeError(f"args is of type {type(args).__name__}, expected {kind.__name__}")
    if not isinstance(args.kappa, int) or args.kappa < 0:
        raise ValueError(f"kappa is {args.kappa}, expected an integer of at least 0")


def require_readable(model: Any, name: str) -> None:
    """Raise ValueError unless the decoder's output and the head's weight determine the logits.

    Refused are models on several devices, with adapters of prompts or of the head, and with capped logits.
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
        loading = {"dtype": trainer.model.dtype, "device_map": None, **options}
        teacher = create_model_from_path(name, AutoModelForCausalLM, **loading)
    else:
        name = teacher.name_or_path or type(teacher).__name__
        try:  # the folder that the model was loaded from may have one
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
        prepared = trainer.accelerator.prepare_model(teacher, evaluation_mode=True)
    prepared.eval()  # DeepSpeed's engine returns nothing
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


@contextmanager
def head_of(model: Any, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor | None, float]]:
    """Gather the head's weight (V, D) and bias (V,) from ZeRO-3 or FSDP2, and the scale of the logits.

    A softmax at temperature T of scaled logits equals one at T / scale of the head's output.
    """
    output = model.get_output_embeddings()
    bias = getattr(output, "bias", None)

    def whole(parameter: Tensor) -> Tensor:
        return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).to(dtype)

    with maybe_gather_lm_head_ctx(output.weight, bias):
        scale = logit_scale(model.config.get_text_config())
        yield whole(output.weight), None if bias is None else whole(bias), scale


class SeveralTeachers:
    """Mixin of both trainers: M frozen teachers, and the fused loss of the student's completions."""

    def take_teachers(self: Any, teachers: list[Any]) -> None:
        if not teachers:
            raise ValueError("teacher_models is empty, expected at least one model or path")
        loaded = not any(isinstance(teacher, str | os.PathLike) for teacher in teachers)
        if loaded and self.args.teacher_model_init_kwargs:
            raise ValueError("teacher_model_init_kwargs is given, expected none: no teacher is a path")
        require_readable(self.model, "the student")
        weights = self.args.teacher_weights or [1 / len(teachers)] * len(teachers)
        if len(weights) != len(teachers):
            raise ValueError(f"teacher_weights is {weights}, expected {len(teachers)} numbers")
        self._log_alpha_M = log_weights(weights)
        self.teacher_models = [load_teacher(self, teacher) for teacher in teachers]
        n_rows = self.model.config.get_text_config().vocab_size
        self._n_vocabulary = min(n_rows, 1 + max(vocabulary_of(self).values()))
        self.redirect = _ForwardRedirection()

    def teachers_topk(
        self: Any, inputs: dict[str, Any], completions: Completions, temperature: float
    ) -> dict[str, Tensor]:
        """Return the teacher fields of LossTokens, computed once per batch and stored in `inputs`."""
        if "teachers_topk" not in inputs:
            topk = [self._topk(model, completions, temperature) for model in self.teacher_models]
            ids_NMS, logps_NMS = (torch.stack(list(column), 1) for column in zip(*topk, strict=True))
            inputs["teachers_topk"] = {
                "teacher_ids_NMS": ids_NMS,
                "teacher_logps_NMS": logps_NMS,
                "log_alpha": self._log_alpha_M.to(ids_NMS.device),
            }
        return inputs["teachers_topk"]

    def _hidden(self: Any, model: Any, completions: Completions, fp32_head: bool = False) -> Tensor:
        """Return (N, D) hidden states in the head's dtype: bf16 under autocast to bf16, as in TRL.

        Autocast to fp16 leaves the head in fp32, since the fused loss computes unscaled gradients in forward.
        """
        with self.accelerator.autocast():
            output = model.get_decoder()(
                input_ids=completions.input_ids, attention_mask=completions.attention_mask, use_cache=False
            )
            states_BTD = output.last_hidden_state[:, -completions.counted_BT.shape[1] - 1 : -1]
            device = states_BTD.device.type
            bf16 = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16
        dtype = torch.float32 if fp32_head else torch.bfloat16 if bf16 else states_BTD.dtype
        return states_BTD[completions.counted_BT].to(dtype)

    @torch.no_grad()
    def _topk(self: Any, wrapped: Any, completions: Completions, temperature: float) -> tuple[Tensor, Tensor]:
        bare = self.accelerator.unwrap_model(wrapped)

        def inside() -> Any:
            model = base_of(bare)
            hidden_ND = self._hidden(model, completions)
            with head_of(model, hidden_ND.dtype) as (weight_VD, bias_V, scale):
                kappa = min(self.args.kappa, len(weight_VD))
                return linear_topk_logprobs(
                    hidden_ND, weight_VD, kappa, bias_V=bias_V, temperature=temperature / scale
                )

        topk = self.redirect(wrapped, bare, inside)
        padding = topk.ids_NS >= self._n_vocabulary
        return topk.ids_NS.masked_fill(padding, 0), topk.logps_NS.masked_fill(padding, -torch.inf)

    def fused(
        self: Any, student: Any, completions: Completions, tokens: LossTokens, **settings: Any
    ) -> tuple[Tensor, LossStats]:
        """Compute linear_smopd_loss; call it inside the wrapper's forward, which gathers the weights."""
        args, model = self.args, base_of(student)
        hidden_ND = self._hidden(model, completions, getattr(args, "cast_lm_head_to_fp32", False))
        with head_of(model, hidden_ND.dtype) as (weight_VD, bias_V, scale):
            for name in ("temperature", "kl_temperature"):
                settings[name] /= scale
            objective = LossSettings(kappa=args.kappa, merge=args.merge, tail=args.tail, **settings)
            options = {"bias_V": bias_V, "chunk_bytes": args.chunk_bytes}
            return linear_smopd_loss(hidden_ND, weight_VD, tokens, objective, **options)

    def log_means(self: Any, stats: LossStats, **columns: Tensor) -> None:
        """Log means over all ranks' tokens of the mixture's columns and these; call after forward."""
        columns |= {"opd/kl": stats.kl_N, "opd/teacher_mass": stats.teacher_mass_N}
        columns["opd/student_mass"] = stats.student_mass_N
        sums = torch.stack([torch.ones_like(stats.kl_N).sum(), *(x.float().sum() for x in columns.values())])
        count, *totals = self.accelerator.reduce(sums, reduction="sum").tolist()
        self.log_values({name: total / max(count, 1.0) for name, total in zip(columns, totals, strict=True)})

    def log_values(self: Any, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._metrics["train" if self.model.training else "eval"][name].append(value)


def base_of(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model
