"""What a vLLM engine takes of a GPU: one rule for the engines (engines.py) and the planner (smopd.plan).

weights   this GPU's part; a head of the teachers' pooler stands whole on every GPU
work      CUDA graphs and the largest forward, assumed
cache     keys and values; as set; or what the set share of the GPU leaves; or
          scoring: one batch and one sequence, as nothing is read from it again
          sampling: a quarter of the room beside weights and work. The rest is for what comes after the
          engine and stays: AdamW's states, teachers, engines of later runs.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from smopd.engine.models.sizes import ModelNumbers
from smopd.engine.settings import Vllm, VllmSettings

GIB = 1 << 30
WORK = 2 * GIB
BATCH = 16_384  # positions: the most that vLLM computes at once by default
BLOCK = 16  # positions: vLLM keeps one block for itself
SAMPLING_PART = 4  # ours


@dataclass(frozen=True)
class Gpu:
    """One GPU when an engine is made, in bytes; `asleep` is what sleeping engines take when they wake."""

    free: int
    total: int
    asleep: int = 0

    @property
    def room(self) -> int:
        return self.free - self.asleep


@dataclass(frozen=True)
class EngineMemory:
    """Bytes on one GPU of an engine that is awake.

    Attributes:
        head: read after vLLM has made the engine, so over the share that it was given.
        least: the cache of one longest sequence, without which vLLM makes no engine.
    """

    weights: int
    head: int
    cache: int
    least: int
    work: int = WORK

    @property
    def inside(self) -> int:
        """What vLLM itself counts."""
        return self.weights + self.cache + self.work

    @property
    def total(self) -> int:
        return self.inside + self.head

    def asleep(self, tags: Collection[str]) -> int:
        """Of an engine whose `tags` ("weights", "kv_cache") have left the GPU."""
        if not tags:
            return 0
        return self.cache * ("kv_cache" in tags) + self.weights * ("weights" in tags) + self.work


def engine_memory(
    wanted: Vllm | VllmSettings,
    model: ModelNumbers,
    width: int,
    longest: int,
    gpu: Gpu,
    *,
    samples: bool,
) -> EngineMemory:
    """What an engine takes.

    Args:
        width: bytes of a weight, and of a number in the cache.
        longest: positions of its longest sequence.
        samples: else it scores by the pooler's head.
    """
    parallel = wanted.tensor_parallel_size
    apart = not samples and (parallel > 1 or not model.tied)
    inside = model.parameters - model.head_parameters * (apart and not model.tied)
    weights, head = -(-width * inside // parallel), width * model.head_parameters * apart
    position = model.kv_bytes(width, parallel)
    least = position * (longest + BLOCK)
    if wanted.kv_cache_bytes is not None:
        cache = wanted.kv_cache_bytes
    elif wanted.gpu_memory_share is not None:
        cache = int(wanted.gpu_memory_share * gpu.total) - weights - WORK
    elif samples:
        cache = max(least, (gpu.room - weights - WORK) // SAMPLING_PART)
    else:
        cache = least + position * BATCH
    return EngineMemory(weights, head, cache, least)


def vllm_arguments(
    wanted: VllmSettings, taken: EngineMemory, gpu: Gpu, *, sleeps: bool, samples: bool
) -> dict[str, Any]:
    """`taken` as arguments of vllm.LLM, which makes no engine whose share is not free, whatever the cache.

    Raises:
        ValueError: weights and cache have no room.
    """
    if wanted.gpu_memory_share is not None and wanted.kv_cache_bytes is None:
        return {"gpu_memory_utilization": wanted.gpu_memory_share}
    least, room = taken.total - taken.work, gpu.free if sleeps else gpu.room
    if least > room:
        raise ValueError(
            f"a vLLM engine takes {least / GIB:.1f} GiB of weights and cache, expected at most "
            f"{room / GIB:.1f}, what is free less what sleeping engines need (python -m smopd.plan)"
        )
    if samples and wanted.kv_cache_bytes is None:
        return {"gpu_memory_utilization": min(taken.inside, gpu.free) / gpu.total}
    return {"gpu_memory_utilization": taken.weights / gpu.total, "kv_cache_memory_bytes": taken.cache}
