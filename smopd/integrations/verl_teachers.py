"""verl's teachers: their tokenizers compared as they are started, and all of them asked for each sequence."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import torch
from torch import Tensor

from smopd.integrations.teacher_mixing import log_weights, require_same_tokens
from smopd.integrations.verl_host import ORIGINALS, filesystem, tokenizers
from smopd.integrations.verl_loss import LOSS_MODE
from smopd.ops import teacher_mixture


def _initialize_teacher_model_managers(self: Any) -> None:
    """In verl's MultiTeacherModelManager, before any teacher's server is up: compares the tokenizers.

    A teacher whose tokenizer is not to be had here (on a remote file system, say) is named on stderr.

    Raises:
        ValueError: a token has another id for a teacher than for the student.
    """
    settings = self.distillation_config
    if settings.distillation_loss.loss_mode == LOSS_MODE:
        student = self.config.actor_rollout_ref.model
        options = {"trust_remote_code": student.get("trust_remote_code", False)}
        path = filesystem.copy_to_local(student.get("tokenizer_path") or student.path)
        own = tokenizers.hf_tokenizer(path, **options).get_vocab()
        for key, teacher in settings.teacher_models.items():
            try:
                other = tokenizers.hf_tokenizer(teacher.model_path, **options).get_vocab()
            except (OSError, ValueError) as missing:
                print(f"smopd: teacher {key!r} has no tokenizer here to compare: {missing}", file=sys.stderr)
                continue
            require_same_tokens(own, other, f"{key!r} ({teacher.model_path})")
    ORIGINALS["_initialize_teacher_model_managers"](self)


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
