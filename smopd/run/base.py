"""The model that every run starts from: a path, or what a factory makes, warmed up if the recipe says so."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from smopd.config.settings import Settings
from smopd.data.prompts import DemonstrationSet
from smopd.engine import distributed
from smopd.engine.files import empty_partial, replace_folder, room_for
from smopd.engine.imports import import_function
from smopd.engine.models.loading import stored_dtype
from smopd.engine.student.checkpoint import export
from smopd.engine.student.optimizers import last_share
from smopd.record.files import JsonlLog
from smopd.record.progress import Progress
from smopd.run import build
from smopd.run.failures import error_context
from smopd.run.folder import mark_done
from smopd.run.warm_start import warm_start


def initial_model(settings: Settings, folder: Path) -> str:
    """Where the model stands that nothing has been trained on; makes it in `folder` if a factory is to."""
    origin = settings.model
    if origin.factory is None:
        return str(origin.path)
    made = folder / "initial"

    def make() -> None:
        if made.exists():
            return
        model, tokenizer = import_function(str(origin.factory))(seed=settings.seed, **origin.kwargs)
        with room_for(made):
            partial = empty_partial(made)
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            replace_folder(partial, made)

    with error_context("model.factory"):
        distributed.on_rank0(make)
    return str(made)


def make_base(
    settings: Settings,
    folder: Path,
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    demonstrations: DemonstrationSet | None,
    device: torch.device,
) -> None:
    """Warms the model at `path` up on the demonstrations, if there are any, and exports it to `folder`."""
    warm = settings.warm_start
    if warm is None or demonstrations is None:
        student = build.student(settings, path, device, lora=None)
        steps = 0
    else:
        steps = warm.steps
        student = build.student(
            settings,
            path,
            device,
            lora=None,
            learning_rate=warm.learning_rate,
            warmup_steps=warm.warmup_steps,
            schedule=partial(last_share, updates=steps, share=warm.decay_share),
        )
        log = JsonlLog(folder / "metrics.jsonl")
        writes = distributed.rank() == 0
        if writes:
            log.cut(0)
        with Progress("warm start", steps) if writes else nullcontext() as shown:
            warm_start(student, demonstrations, warm, settings.seed, log, shown)
    export(student, tokenizer, folder / "export", stored_dtype(path))
    mark_done(folder, {"steps": steps})
