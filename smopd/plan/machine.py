"""What a plan is made for: GPUs, a rank's share of a step, and the lines and columns of the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from smopd.config.settings import Settings
from smopd.plan.memory import MicroBatch
from smopd.plan.models import ModelSizes

GIB = 1 << 30
RUNNING = ("rollout", "teachers", "update", "sync")
COLUMNS = ("start", *RUNNING)
WIDTHS = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Machine:
    """What the run is to fit on. Bandwidths are what one GPU receives, in bytes a second; all assumed."""

    gpus: int
    memory: int
    """Bytes a GPU."""
    per_node: int = 8
    reserve: int = 3 * GIB
    """Of each GPU: CUDA context, NCCL's buffers, what the allocator cannot reuse."""
    inside: float = 200e9
    """Within a node."""
    between: float = 40e9
    """Between nodes."""


@dataclass(frozen=True)
class Need:
    """One line: bytes on a GPU by column."""

    what: str
    bytes: Mapping[str, int]
    note: str = ""


@dataclass(frozen=True)
class Shape:
    """What the settings say of a rank's share."""

    shards: int
    batch: MicroBatch
    longest: int
    """Positions of the longest prompt with its longest response."""
    responses: int
    """Of a step, on this rank."""
    masked: bool

    @classmethod
    def of(cls, settings: Settings, machine: Machine) -> Shape:
        student, rollout, loop = settings.student, settings.rollout, settings.loop
        shards = student.shard_size or machine.gpus
        if shards > machine.gpus or machine.gpus % shards:
            raise ValueError(f"student.shard_size: got {shards}, expected a divisor of {machine.gpus} GPUs")
        prompt, answer, budget_ = (
            settings.data.max_prompt_tokens,
            rollout.max_new_tokens,
            student.micro_batch_tokens,
        )
        members = 1
        if student.share_prompts:
            members = max(1, min(rollout.group_size, (budget_ - prompt) // max(1, answer - 1)))
        unit = prompt + members * (answer - 1)
        masked = student.attention == "sdpa"
        length = max(unit, student.row_tokens) if masked else unit
        prompts = -(-loop.prompts_per_step // machine.gpus)
        units = -(-loop.prompts_per_step // (machine.gpus * loop.updates_per_step))
        units *= -(-rollout.group_size // members)
        tokens = min(max(budget_, length), units * length)
        rows = min(max(1, budget_ // length), units)
        keys = tokens * members * (prompt + answer - 1) // length
        batch = MicroBatch(tokens, rows * length * length if masked else 0, tokens, keys)
        return cls(shards, batch, settings.longest_sequence, prompts * rollout.group_size, masked)


def trained_parameters(settings: Settings, sizes: ModelSizes) -> int:
    lora = settings.student.lora
    return sizes.parameters if lora is None else sizes.lora_parameters(lora.rank, lora.targets)
