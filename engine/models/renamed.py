"""What transformers renames within the versions that we admit, by what is there and not by version."""

from __future__ import annotations

import inspect

from transformers import PreTrainedModel


def cache_argument(model: PreTrainedModel) -> str:
    """The name under which `forward` takes the key-value cache: `cache` since 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def checkpoint_activations(model: PreTrainedModel) -> None:
    """`gradient_checkpointing_enable` without reentry; 5.23 calls it `activation_checkpointing_enable`."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
