"""Which settings would make a run fit: each one is tried by the planner's own arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from smopd.budget import Budget, Machine, budget
from smopd.config import Settings, merged
from smopd.sizes import Models

GPUS = "--gpus"
LEAST_TOKENS = 1024  # ours: below this a micro-batch leaves a GPU idle
MIB = 1 << 20


@dataclass(frozen=True)
class Change:
    """A setting by its dotted path (or the number of GPUs), and another value for it."""

    setting: str
    value: Any


def advise(settings: Settings, models: Models, machine: Machine) -> list[tuple[Change, ...]]:
    """Ways to make the run fit: every single change that does, else several that do together, else none."""
    ladders = list(_ladders(settings, machine))
    single: list[tuple[Change, ...]] = []
    for ladder in ladders:
        for change in ladder:
            if (tried := _after((change,), settings, models, machine)) is not None and tried.fits:
                single.append((change,))
                break
    if single:
        return single
    chosen: tuple[Change, ...] = ()
    over = budget(settings, models, machine).over
    for ladder in ladders:
        best = None
        for change in ladder:
            tried = _after((*chosen, change), settings, models, machine)
            if tried is not None and tried.over < over:
                best, over = change, tried.over
        if best is not None:
            chosen = (*chosen, best)
        if over == 0:
            return [_needed(chosen, settings, models, machine)]
    return []


def _needed(
    changes: tuple[Change, ...], settings: Settings, models: Models, machine: Machine
) -> tuple[Change, ...]:
    """`changes` without those that it fits without."""
    for change in changes:
        others = tuple(other for other in changes if other is not change)
        tried = _after(others, settings, models, machine)
        if tried is not None and tried.fits:
            changes = others
    return changes


def _after(
    changes: tuple[Change, ...], settings: Settings, models: Models, machine: Machine
) -> Budget | None:
    """The budget with `changes`; None where a value is not allowed."""
    values = settings.model_dump()
    for change in changes:
        if change.setting == GPUS:
            machine = replace(machine, gpus=change.value)
            continue
        nested: Any = change.value
        for name in reversed(change.setting.split(".")):
            nested = {name: nested}
        values = merged(values, nested)
    try:
        return budget(Settings.model_validate(values), models, machine)
    except ValueError:
        return None


def _ladders(settings: Settings, machine: Machine) -> Iterator[list[Change]]:
    """What may be changed, that which costs least first; each with its values, mildest first."""

    def ladder(setting: str, *values: Any) -> list[Change]:
        return [Change(setting, value) for value in values]

    student, rollout, teachers = settings.student, settings.rollout, settings.teachers
    sizes = [size for size in (2, 4, 8) if machine.gpus % size == 0]
    yield ladder("student.micro_batch_tokens", *_halves(student.micro_batch_tokens, LEAST_TOKENS))
    if not student.gradient_checkpointing:
        yield ladder("student.gradient_checkpointing", True)
    yield ladder("student.head_chunk_bytes", 256 * MIB, 64 * MIB)
    if student.share_prompts:
        yield ladder("student.share_prompts", False)
    if rollout.dtype != "bfloat16" and not rollout.urls:
        yield ladder("rollout.dtype", "bfloat16")
    if teachers.models and teachers.dtype != "bfloat16":
        yield ladder("teachers.dtype", "bfloat16")
    for name, section in (("rollout", rollout), ("teachers", teachers)):
        if (name == "teachers" and not teachers.models) or (name == "rollout" and rollout.urls):
            continue
        if section.engine == "local":
            if name == "rollout":
                yield ladder("rollout.max_batch_tokens", *_halves(rollout.max_batch_tokens, LEAST_TOKENS))
            yield ladder(f"{name}.engine", "vllm")
            continue
        share = section.vllm.gpu_memory_share
        if share is not None:
            lower = [tenths / 10 for tenths in range(9, 0, -1) if tenths / 10 < share]
            yield ladder(f"{name}.vllm.gpu_memory_share", *lower)
        current = section.vllm.tensor_parallel_size
        yield ladder(f"{name}.vllm.tensor_parallel_size", *(size for size in sizes if size > current))
    if student.shard_size is not None:
        yield ladder("student.shard_size", None)
    if student.strategy != "fsdp2":
        yield ladder("student.zero_stage", 3)
    yield ladder("student.offload_optimizer", True)
    if teachers.models:
        yield ladder("opd.kappa", *(kappa for kappa in (32, 16, 8) if kappa < settings.opd.kappa))
    yield ladder("student.lora", {"rank": 16, "alpha": 32})
    yield ladder(GPUS, *(machine.gpus * factor for factor in (2, 4, 8)))


def _halves(value: int, least: int) -> list[int]:
    halves = []
    while (value := value // 2) >= least:
        halves.append(value)
    return halves
