"""From settings and a model's path to the student, the rollout engine and the teachers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from smopd.config import Settings
from smopd.engine.local import LocalRollout
from smopd.engine.models import end_token_ids, load_model, load_tokenizer
from smopd.engine.student import Student
from smopd.engine.teachers import LocalTeachers
from smopd.engine.types import Packing, TrainSettings
from smopd.failures import reading


def student(settings: Settings, path: str, device: torch.device, **changes: Any) -> Student:
    """The model at `path`, ready to train; `changes` replace fields of TrainSettings."""
    torch.manual_seed(settings.seed)
    with reading("model"):
        model = load_model(path, torch.float32)
    return Student(model, train_settings(settings, **changes), device)


def rollout_engine(settings: Settings, path: str, device: torch.device) -> LocalRollout:
    """Samples from its own copy of the model at `path`."""
    with reading("model"):
        model = load_model(path, getattr(torch, settings.rollout.dtype), device)
        ends = end_token_ids(model, load_tokenizer(path))
    longest = settings.data.max_prompt_tokens + settings.rollout.max_new_tokens
    with reading("rollout.max_new_tokens"):
        limit = getattr(model.config, "max_position_embeddings", longest)
        if longest > limit:
            raise ValueError(
                f"{settings.rollout.max_new_tokens} behind data.max_prompt_tokens "
                f"{settings.data.max_prompt_tokens} is over the model's {limit} positions"
            )
    return LocalRollout(model, ends, settings.rollout.max_batch_tokens)


def teacher_engine(
    settings: Settings, paths: Sequence[str], vocabulary: int, device: torch.device
) -> LocalTeachers | None:
    """The frozen teachers, or None where there are none."""
    if not paths:
        return None
    with reading("teachers.models"):
        models = [load_model(path, getattr(torch, settings.teachers.dtype), device) for path in paths]
        teachers = LocalTeachers(models, packing(settings), vocabulary)
    with reading("opd.kappa"):
        if settings.opd.kappa > vocabulary:
            raise ValueError(f"{settings.opd.kappa} is over the vocabulary of {vocabulary}")
    return teachers


def train_settings(settings: Settings, **changes: Any) -> TrainSettings:
    elsewhere = {"strategy", "micro_batch_tokens", "row_tokens", "share_prompts"}
    values = settings.student.model_dump(exclude=elsewhere)
    return TrainSettings(**{**values, "packing": packing(settings), **changes})


def packing(settings: Settings) -> Packing:
    student = settings.student
    return Packing(student.micro_batch_tokens, student.row_tokens, student.share_prompts)
