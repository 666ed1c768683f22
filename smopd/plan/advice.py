"""Which settings would make a run fit: each one is tried by the planner's own arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from smopd.config.settings import Settings, merged
from smopd.plan.budget import Budget, Runs, budget
from smopd.plan.machine import GIB, Machine
from smopd.plan.models import Models

GPUS = "--gpus"
LEAST_TOKENS = 1024  # ours: below this a micro-batch leaves a GPU idle
MIB = 1 << 20


@dataclass(frozen=True)
class Change:
    """A setting by its dotted path (or the number of GPUs), and another value for it."""

    setting: str
    value: Any


Changes = tuple[Change, ...]
"""Made together."""


@dataclass(frozen=True)
class _Case:
    """A run that does not fit, after those before it."""

    settings: Settings
    models: Models
    machine: Machine
    earlier: Runs

    def after(self, changes: Changes) -> Budget | None:
        """The budget with `changes` in every run; None where a value is not allowed."""
        machine = self.machine
        values: dict[str, Any] = {}
        for change in changes:
            if change.setting == GPUS:
                machine = replace(machine, gpus=change.value)
                continue
            nested: Any = change.value
            for name in reversed(change.setting.split(".")):
                nested = {name: nested}
            values = merged(values, nested)

        def changed(settings: Settings) -> Settings:
            return Settings.model_validate(merged(settings.model_dump(), values))

        try:
            earlier = [(changed(settings), models) for settings, models in self.earlier]
            return budget(changed(self.settings), self.models, machine, earlier)
        except ValueError:
            return None

    def needed(self, changes: Changes) -> Changes:
        """`changes` without those that it fits without."""
        for change in changes:
            others = tuple(other for other in changes if other is not change)
            tried = self.after(others)
            if tried is not None and tried.fits:
                changes = others
        return changes


def advise(settings: Settings, models: Models, machine: Machine, earlier: Runs = ()) -> list[Changes]:
    """Ways to make the run fit: every single change that does, else several that do together, else none."""
    case = _Case(settings, models, machine, earlier)
    ladders = list(_ladders(settings, models, machine))
    single: list[Changes] = []
    for ladder in ladders:
        for changes in ladder:
            if (tried := case.after(changes)) is not None and tried.fits:
                single.append(changes)
                break
    if single:
        return single
    chosen: Changes = ()
    over = budget(settings, models, machine, earlier).over
    for ladder in ladders:
        best: Changes = ()
        for changes in ladder:
            tried = case.after((*chosen, *changes))
            if tried is not None and tried.over < over:
                best, over = changes, tried.over
        chosen = (*chosen, *best)
        if over == 0:
            return [case.needed(chosen)]
    return []


def _ladders(settings: Settings, models: Models, machine: Machine) -> Iterator[list[Changes]]:
    """What may be changed, that which costs least first; each with its values, mildest first."""

    def ladder(setting: str, *values: Any) -> list[Changes]:
        return [(Change(setting, value),) for value in values]

    student, rollout, teachers = settings.student, settings.rollout, settings.teachers
    here = {"rollout": not rollout.urls, "teachers": bool(models.teachers)}
    sections = [(name, getattr(settings, name)) for name in here if here[name]]
    engines = [(name, section.vllm) for name, section in sections if section.engine == "vllm"]
    yield ladder("student.micro_batch_tokens", *_halves(student.micro_batch_tokens, LEAST_TOKENS))
    if not student.gradient_checkpointing:
        yield ladder("student.gradient_checkpointing", True)
    yield ladder("student.head_chunk_bytes", 256 * MIB, 64 * MIB)
    if student.share_prompts:
        yield ladder("student.share_prompts", False)
    for name, section in sections:
        if section.dtype != "bfloat16":
            yield ladder(f"{name}.dtype", "bfloat16")
    for name, section in sections:
        if section.engine == "local":
            if name == "rollout":
                yield ladder("rollout.max_batch_tokens", *_halves(rollout.max_batch_tokens, LEAST_TOKENS))
            yield ladder(f"{name}.engine", "vllm")
    for name, vllm in engines:
        if not vllm.sleep:
            yield ladder(f"{name}.vllm.sleep", True)
        share = vllm.gpu_memory_share
        if share is not None:
            lower = [tenths / 10 for tenths in range(9, 0, -1) if tenths / 10 < share]
            yield ladder(f"{name}.vllm.gpu_memory_share", *lower)
        most = vllm.kv_cache_bytes or 16 * GIB
        yield ladder(f"{name}.vllm.kv_cache_bytes", *_halves(most, 256 * MIB))
        if vllm.placement == "colocated" and vllm.tensor_parallel_size == 1:
            yield ladder(f"{name}.vllm.placement", "process")
    if ("teachers", teachers.vllm) in engines:
        most = min(teachers.vllm.engines or len(models.teachers), len(models.teachers))
        yield ladder("teachers.vllm.engines", *range(most - 1, 0, -1))
    in_process = [(name, vllm) for name, vllm in engines if vllm.placement == "colocated"]
    if in_process:  # of one size, as vLLM has it
        current = max(vllm.tensor_parallel_size for _, vllm in in_process)
        wider = [size for size in (2, 4, 8) if size > current and machine.gpus % size == 0]
        yield [
            tuple(Change(f"{name}.vllm.tensor_parallel_size", size) for name, _ in in_process)
            for size in wider
        ]
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
