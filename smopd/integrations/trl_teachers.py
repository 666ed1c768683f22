"""The frozen teachers beside a TRL trainer's student: settings, loading, and what is refused by name."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from logging import getLogger
from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.models import prepare_deepspeed
from trl.trainer.utils import create_model_from_path

from smopd.engine.models.loading import logit_scale
from smopd.integrations.teacher_mixing import require_same_tokens

logger = getLogger(__name__)


@dataclass
class MixtureConfig:
    """How the teachers are loaded and heard; beside TRL's own settings."""

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


def load_teachers(trainer: Any, teachers: list[Any]) -> list[Any]:
    """The teachers as models, frozen and prepared as the trainer's accelerator has its own.

    Raises:
        ValueError: one has other tokens, a smaller vocabulary or what `require_readable` refuses; or
            teacher_model_init_kwargs are given and no path to use them for.
    """
    paths = [isinstance(teacher, str | os.PathLike) for teacher in teachers]
    if trainer.args.teacher_model_init_kwargs and not any(paths):
        raise ValueError(
            "teacher_model_init_kwargs is given, expected none: every teacher is a model already"
        )
    return [_prepared(trainer, teacher) for teacher in teachers]


def _prepared(trainer: Any, teacher: Any) -> Any:
    args, tokenizer = trainer.args, tokenizer_of(trainer)
    options = dict(args.teacher_model_init_kwargs or {})
    options.setdefault("trust_remote_code", args.trust_remote_code)
    if (revision := getattr(args, "teacher_model_revision", None)) is not None:
        options.setdefault("revision", revision)
    if isinstance(teacher, str | os.PathLike):
        told = {name: options[name] for name in ("trust_remote_code", "revision") if name in options}
        _compare_tokens(tokenizer, AutoTokenizer.from_pretrained(teacher, **told), str(teacher))
        loading = {"dtype": trainer.model.dtype, "device_map": None, **options}
        teacher = create_model_from_path(str(teacher), AutoModelForCausalLM, **loading)
    else:
        _compare_own_tokens(tokenizer, teacher)
    size, expected = teacher.config.get_text_config().vocab_size, n_ids(tokenizer)
    if size < expected:
        raise ValueError(
            f"teacher {_name(teacher)} has a vocabulary of {size}, "
            f"expected the student's, of {expected} tokens or padded above it"
        )
    require_readable(teacher, f"teacher {_name(teacher)}")
    if trainer.is_deepspeed_enabled:
        prepared = prepare_deepspeed(teacher, trainer.accelerator)
    else:
        prepared = trainer.accelerator.prepare_model(teacher, evaluation_mode=True)
    prepared.eval()  # DeepSpeed's engine returns nothing
    return prepared.requires_grad_(False)


def _name(model: Any) -> str:
    return model.name_or_path or type(model).__name__


def _compare_own_tokens(tokenizer: Any, teacher: nn.Module) -> None:
    """A model knows no tokenizer, but may have been loaded from beside one."""
    try:
        beside = AutoTokenizer.from_pretrained(teacher.name_or_path or "", local_files_only=True)
    except (OSError, ValueError):
        logger.warning(
            f"teacher {_name(teacher)} has no tokenizer at hand: only its vocabulary size is compared"
        )
        return
    _compare_tokens(tokenizer, beside, _name(teacher))


def _compare_tokens(ours: Any, theirs: Any, teacher: str) -> None:
    require_same_tokens(ours.get_vocab(), theirs.get_vocab(), teacher, more=True)


def require_config(args: Any, kind: type[Any]) -> None:
    """Refuses settings that no loss can be made of.

    Raises:
        TypeError: args are not of the trainer's own class.
        ValueError: kappa is negative.
    """
    if not isinstance(args, kind):
        raise TypeError(f"args is of type {type(args).__name__}, expected {kind.__name__}")
    if not isinstance(args.kappa, int) or args.kappa < 0:
        raise ValueError(f"kappa is {args.kappa}, expected an integer of at least 0")


def tokenizer_of(trainer: Any) -> Any:
    return getattr(trainer.processing_class, "tokenizer", trainer.processing_class)


def n_ids(tokenizer: Any) -> int:
    """One more than the tokenizer's highest id."""
    return 1 + max(tokenizer.get_vocab().values())


def require_readable(model: Any, name: str) -> None:
    """Refuses what a loss of the decoder's output and the head's weight would miss.

    Raises:
        ValueError: the model is on several devices, has an adapter of prompts or on its head, or bends its
            logits.
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
