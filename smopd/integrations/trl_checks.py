"""What SMOPD's TRL trainers refuse, by name: settings, tokenizers, models."""

from __future__ import annotations

from typing import Any

from smopd.engine.models.loading import logit_scale


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
