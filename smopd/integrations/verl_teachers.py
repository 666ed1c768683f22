"""verl's teacher manager, asking all teachers for each sequence."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from torch import Tensor

from smopd.integrations.teacher_mixing import log_weights
from smopd.integrations.verl_host import ORIGINALS
from smopd.integrations.verl_loss import LOSS_MODE
from smopd.ops import teacher_mixture


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
