"""What a model's family does to its logits after the head, by the name that its config gives it."""

from __future__ import annotations

from typing import Any

SCALES = ("logit_scale", "output_multiplier", "output_multiplier_scale", "lm_head_multiplier")
DIVISOR = "logits_scaling"
MULTIPLIES = ("hyperclovax",)  # where the divisor's name means a factor
CAPS = ("final_logit_softcapping", "logits_soft_cap")


def logit_scale(config: Any) -> float:
    """The factor of the logits of a language model with this (text) config.

    Raises:
        ValueError: it bends its logits, which no linear head can express.
    """
    for name in CAPS:
        if cap := getattr(config, name, None):
            raise ValueError(
                f"{config.model_type} has {name}={cap}, expected none: "
                "the fused operations take a linear head"
            )
    for name in SCALES:
        if getattr(config, name, None) is not None:
            return float(getattr(config, name))
    divisor = getattr(config, DIVISOR, None)
    if divisor is None:
        return 1.0
    return float(divisor) if config.model_type in MULTIPLIES else 1.0 / float(divisor)
