"""From settings to the things they describe: the student, the engines, the prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from smopd.config import Settings, Source
from smopd.data import Overlong, PromptSet, load_prompts
from smopd.engine.local import LocalRollout
from smopd.engine.models import end_token_ids, load_model, load_tokenizer
from smopd.engine.student import Student
from smopd.engine.teachers import LocalTeachers
from smopd.engine.types import Packing, TrainSettings


def student(settings: Settings, path: str, device: torch.device, **changes: Any) -> Student:
    """The model at `path`, ready to train; `changes` replace fields of TrainSettings."""
    torch.manual_seed(settings.seed)
    return Student(load_model(path, torch.float32), train_settings(settings, **changes), device)


def rollout_engine(settings: Settings, path: str, device: torch.device) -> LocalRollout:
    model = load_model(path, getattr(torch, settings.rollout.dtype), device)
    return LocalRollout(model, end_token_ids(model, load_tokenizer(path)), settings.rollout.max_batch_tokens)


def teacher_engine(
    settings: Settings, paths: Sequence[str], vocabulary: int, device: torch.device
) -> LocalTeachers | None:
    """The frozen teachers, or None where there are none."""
    if not paths:
        return None
    models = [load_model(path, getattr(torch, settings.teachers.dtype), device) for path in paths]
    return LocalTeachers(models, packing(settings), vocabulary)


def train_settings(settings: Settings, **changes: Any) -> TrainSettings:
    elsewhere = {"strategy", "micro_batch_tokens", "row_tokens", "share_prompts"}
    values = settings.student.model_dump(exclude=elsewhere)
    return TrainSettings(**{**values, "packing": packing(settings), **changes})


def packing(settings: Settings) -> Packing:
    student = settings.student
    return Packing(student.micro_batch_tokens, student.row_tokens, student.share_prompts)


def prompt_set(
    settings: Settings, source: Source, tokenizer: PreTrainedTokenizerBase, overlong: Overlong
) -> PromptSet:
    return load_prompts(
        source.source,
        tokenizer,
        prompt_column=source.prompt_column,
        map=source.map,
        max_prompt_tokens=settings.data.max_prompt_tokens,
        overlong=overlong,
        split=source.split,
        limit=source.limit,
        kwargs=source.kwargs,
        system=settings.data.system,
    )
