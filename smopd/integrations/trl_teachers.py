"""The frozen teachers beside a TRL trainer's student: their settings, their loading, and what is refused."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from logging import getLogger
from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.models import prepare_deepspeed
from trl.trainer.utils import create_model_from_path

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
    recompute: bool = field(
        default=False,
        metadata={"help": "Make logits again in backward: chunk_bytes is then all that is held."},
    )


def load_teachers(trainer: Any, teachers: list[Any]) -> list[Any]:
    """The teachers as models, frozen and prepared as the trainer's accelerator has its own.

    Raises:
        ValueError: there is none, or one has another tokenizer, a smaller vocabulary or an adapter that the
            loss cannot read; or teacher_model_init_kwargs are given and no path to use them for.
    """
    paths = [isinstance(teacher, str | os.PathLike) for teacher in teachers]
    if not teachers:
        raise ValueError("teacher_models is empty, expected at least one model or path")
    if trainer.args.teacher_model_init_kwargs and not any(paths):
        raise ValueError(
            "teacher_model_init_kwargs is given, expected none: every teacher is a model already"
        )
    return [_prepared(trainer, teacher) for teacher in teachers]


def _prepared(trainer: Any, teacher: Any) -> Any:
    args, tokenizer = trainer.args, getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    options = dict(args.teacher_model_init_kwargs or {})
    options.setdefault("trust_remote_code", args.trust_remote_code)
    if (revision := getattr(args, "teacher_model_revision", None)) is not None:
        options.setdefault("revision", revision)
    if isinstance(teacher, str | os.PathLike):
        told = {name: options[name] for name in ("trust_remote_code", "revision") if name in options}
        require_same_tokens(tokenizer, AutoTokenizer.from_pretrained(teacher, **told), str(teacher))
        loading = {"dtype": trainer.model.dtype, "device_map": None, **options}
        teacher = create_model_from_path(str(teacher), AutoModelForCausalLM, **loading)
    else:
        _compare_own_tokens(tokenizer, teacher)
    size = teacher.config.get_text_config().vocab_size
    if size < len(tokenizer):
        raise ValueError(
            f"teacher {_name(teacher)} has a vocabulary of {size}, "
            f"expected the student's, of {len(tokenizer)} tokens or padded above it"
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
    require_same_tokens(tokenizer, beside, _name(teacher))


def require_same_tokens(ours: Any, theirs: Any, teacher: str) -> None:
    """Raises ValueError where a token has another id for the teacher."""
    own, other = ours.get_vocab(), theirs.get_vocab()
    differing = sorted(token for token in other.keys() | own.keys() if other.get(token) != own.get(token))
    if differing:
        token = differing[0]
        raise ValueError(
            f"teacher {teacher} has another tokenizer than the student: {token!r} is token "
            f"{other.get(token)} there and {own.get(token)} here"
        )


def require_readable(model: Any, name: str) -> None:
    """Refuses the adapters of peft that a loss of the decoder's output and the head's weight would miss."""
    adapters = getattr(model, "peft_config", {}).values()
    if any(config.is_prompt_learning for config in adapters):
        raise ValueError(f"{name} has a prompt-learning adapter, expected one of weights, such as LoRA")
    if adapters and hasattr(model.get_output_embeddings(), "base_layer"):
        raise ValueError(f"{name} has an adapter on its head, expected none there: the loss reads its weight")
