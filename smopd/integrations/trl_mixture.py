"""The frozen teachers beside a TRL trainer's student, and the fused loss of its completions.

Shapes: B sequences, T completion tokens, N completion tokens that count, M teachers, S = kappa,
V vocabulary, D hidden.
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


@dataclass
class MixtureConfig:
    """How the teachers are loaded and mixed; beside TRL's own settings."""

    kappa: int = field(
        default=16, metadata={"help": "Entries of each teacher's distribution, and of their mixture."}
    )
    merge: bool = field(
        default=True, metadata={"help": "Merge equal ids of the teachers (Eq. 5); false pools them (Eq. 6)."}
    )
    tail: bool = field(
        default=True, metadata={"help": "One more bucket for all that is outside the support: a true KL."}
    )
    teacher_weights: list[float] | None = field(
        default=None, metadata={"help": "One a teacher, summing to 1; null: equal."}
    )
    teacher_model_init_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "For teachers given by path: dtype (the student's), revision, ..."}
    )
    chunk_bytes: int | None = field(
        default=None, metadata={"help": "Bound of the logits held at a time, bytes."}
    )


def require_config(args: Any, kind: type[Any]) -> None:
    """Raises TypeError where args are not of the trainer's own class, ValueError for a bad kappa."""
    if not isinstance(args, kind):
        raise TypeError(f"args is of type {type(args).__name__}, expected {kind.__name__}")
    if not isinstance(args.kappa, int) or args.kappa < 0:
        raise ValueError(f"kappa is {args.kappa}, expected an integer of at least 0")


def require_readable(model: Any, name: str) -> None:
    """Raises ValueError for what a loss of the decoder's output and the head's weight would miss.

    That is a model on several devices, or with an adapter of prompts or on its head, or with capped logits.
    """
    if len(devices := sorted({str(at) for at in (getattr(model, "hf_device_map", None) or {}).values()})) > 1:
        raise ValueError(
            f"{name} is split by its device_map over {', '.join(devices)}, expected one device: load it with "
            "device_map=None, and on several GPUs launch with accelerate launch or torchrun, or show the "
            "process one of them (CUDA_VISIBLE_DEVICES)"
        )
    logit_scale(model.config.get_text_config())
    adapters = getattr(model, "peft_config", {}).values()
    if any(config.is_prompt_learning for config in adapters):
        raise ValueError(f"{name} has a prompt-learning adapter, expected one of weights, such as LoRA")
    if adapters and hasattr(model.get_output_embeddings(), "base_layer"):
        raise ValueError(f"{name} has an adapter on its head, expected none there: the loss reads its weight")


def load_teacher(trainer: Any, teacher: Any) -> Any:
    """A teacher, frozen and prepared as the trainer's accelerator has its own.

    Raises:
        ValueError: it has other tokens, a smaller vocabulary or what `require_readable` refuses.
    """
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
        try:  # a model knows no tokenizer, but may have been loaded from beside one
            tokenizer = AutoTokenizer.from_pretrained(teacher.name_or_path or "", local_files_only=True)
        except (OSError, ValueError):
            tokenizer = None
            logger.warning(f"teacher {name} has no tokenizer at hand: only its vocabulary size is compared")
    if tokenizer is not None:
        require_same_tokens(own_tokens, tokenizer.get_vocab(), name, more=True)
    size, expected = teacher.config.get_text_config().vocab_size, 1 + max(own_tokens.values())
    if size < expected:
        raise ValueError(
            f"teacher {name} has a vocabulary of {size}, "
            f"expected the student's, of {expected} tokens or padded above it"
        )
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
    """The completions of a micro-batch, and which of their tokens count."""

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


class Head(NamedTuple):
    weight_VD: Tensor
    bias_V: Tensor | None
    scale: float
    """What the model multiplies its logits with; a softmax at temperature T of them is one at T / scale."""


@contextmanager
def head_of(model: Any, dtype: torch.dtype) -> Iterator[Head]:
    """The output embedding, whole: shards of ZeRO-3 and FSDP2 are gathered."""
    output = model.get_output_embeddings()
    bias = getattr(output, "bias", None)

    def whole(parameter: Tensor) -> Tensor:
        return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).to(dtype)

    with maybe_gather_lm_head_ctx(output.weight, bias):
        scale = logit_scale(model.config.get_text_config())
        yield Head(whole(output.weight), None if bias is None else whole(bias), scale)


class SeveralTeachers:
    """What both trainers share: M frozen teachers, and the fused loss of the student's completions."""

    def take_teachers(self: Any, teachers: list[Any]) -> None:
        if not teachers:
            raise ValueError("teacher_models is empty, expected at least one model or path")
        if self.args.teacher_model_init_kwargs and not any(
            isinstance(t, str | os.PathLike) for t in teachers
        ):
            raise ValueError(
                "teacher_model_init_kwargs is given, expected none: every teacher is a model already"
            )
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
        self: Any, inputs: dict[str, Any], seen: Completions, temperature: float
    ) -> dict[str, Tensor]:
        """LossTokens' teacher fields, asked once a batch however often it is trained on."""
        if "teachers_topk" not in inputs:
            said = [self._topk(model, seen, temperature) for model in self.teacher_models]
            ids_NMS, logps_NMS = (torch.stack(list(column), 1) for column in zip(*said, strict=True))
            inputs["teachers_topk"] = {
                "teacher_ids_NMS": ids_NMS,
                "teacher_logps_NMS": logps_NMS,
                "log_alpha": self._log_alpha_M.to(ids_NMS.device),
            }
        return inputs["teachers_topk"]

    def _hidden(self: Any, model: Any, seen: Completions, fp32_head: bool = False) -> Tensor:
        """(N, D) in the dtype that the head is to run in: under autocast to bf16 that, as in TRL.

        Not to fp16: the loss makes its gradients in forward, before anything scales them.
        """
        with self.accelerator.autocast():
            output = model.get_decoder()(
                input_ids=seen.input_ids, attention_mask=seen.attention_mask, use_cache=False
            )
            states_BTD = output.last_hidden_state[:, -seen.counted_BT.shape[1] - 1 : -1]
            device = states_BTD.device.type
            bf16 = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16
        dtype = torch.float32 if fp32_head else torch.bfloat16 if bf16 else states_BTD.dtype
        return states_BTD[seen.counted_BT].to(dtype)

    @torch.no_grad()
    def _topk(self: Any, wrapped: Any, seen: Completions, temperature: float) -> tuple[Tensor, Tensor]:
        bare = self.accelerator.unwrap_model(wrapped)

        def inside() -> Any:
            model = base_of(bare)
            hidden_ND = self._hidden(model, seen)
            with head_of(model, hidden_ND.dtype) as head:
                kappa = min(self.args.kappa, len(head.weight_VD))
                scaled = temperature / head.scale
                return linear_topk_logprobs(
                    hidden_ND, head.weight_VD, kappa, bias_V=head.bias_V, temperature=scaled
                )

        said = self.redirect(wrapped, bare, inside)
        padding = said.ids_NS >= self._n_vocabulary
        return said.ids_NS.masked_fill(padding, 0), said.logps_NS.masked_fill(padding, -torch.inf)

    def fused(
        self: Any, student: Any, seen: Completions, tokens: LossTokens, **settings: Any
    ) -> tuple[Tensor, LossStats]:
        """linear_smopd_loss of the student; inside its wrapper's forward, where its weights are whole."""
        args, model = self.args, base_of(student)
        hidden_ND = self._hidden(model, seen, getattr(args, "cast_lm_head_to_fp32", False))
        with head_of(model, hidden_ND.dtype) as head:
            for name in ("temperature", "kl_temperature"):
                settings[name] /= head.scale
            objective = LossSettings(kappa=args.kappa, merge=args.merge, tail=args.tail, **settings)
            options = {"bias_V": head.bias_V, "chunk_bytes": args.chunk_bytes}
            return linear_smopd_loss(hidden_ND, head.weight_VD, tokens, objective, **options)

    def log_means(self: Any, stats: LossStats, **columns: Tensor) -> None:
        """Means over all ranks' tokens of the mixture's columns and these; outside the wrapped forward."""
        columns |= {
            "opd/kl": stats.kl_N,
            "opd/teacher_mass": stats.teacher_mass_N,
            "opd/student_mass": stats.student_mass_N,
        }
        sums = torch.stack([torch.ones_like(stats.kl_N).sum(), *(x.float().sum() for x in columns.values())])
        count, *totals = self.accelerator.reduce(sums, reduction="sum").tolist()
        self.log_values({name: total / max(count, 1.0) for name, total in zip(columns, totals, strict=True)})

    def log_values(self: Any, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._metrics["train" if self.model.training else "eval"][name].append(value)


def base_of(model: Any) -> Any:
    """The transformers model under peft's wrapper, if there is one."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
