"""GPU memory of a vLLM engine. The engines (engines.py) and the planner (examples/plan.py) share this rule.

weights   this GPU's shard; each GPU has the whole head of a teacher's pooler
work      an estimate for CUDA graphs and the largest forward
cache     keys and values: `kv_cache_memory_bytes` or what `gpu_memory_utilization` leaves. If neither is set:
          scoring: room for one batch and one sequence, because no later request reads the cache
          sampling: a quarter of the memory that weights and work leave; the rest is for AdamW's states,
          for teachers, and for engines of later runs, which are allocated afterwards
"""

from collections.abc import Collection
from typing import Any, NamedTuple

from smopd.engine.models.sizes import ModelNumbers
from smopd.engine.settings import Vllm

GIB = 1 << 30
WORK = 2 * GIB
BATCH = 16_384  # vLLM's default limit of positions in one forward
BLOCK = 16  # positions; vLLM reserves one block
SAMPLING_PART = 4  # ours


class Gpu(NamedTuple):
    """Bytes of one GPU before an engine is created. `asleep` is reserved for sleeping engines."""

    free: int
    total: int
    asleep: int = 0

    @property
    def room(self) -> int:
        return self.free - self.asleep


class EngineMemory(NamedTuple):
    """Bytes of an awake engine on one GPU.

    head: loaded by the pooler, so not in vLLM's own share. least: the cache for the longest sequence.
    """

    weights: int
    head: int
    cache: int
    least: int
    work: int = WORK

    @property
    def inside(self) -> int:
        """The bytes that vLLM itself counts."""
        return self.weights + self.cache + self.work

    @property
    def total(self) -> int:
        return self.inside + self.head

    def asleep(self, tags: Collection[str]) -> int:
        """Return the bytes to reserve for waking up while `tags` ("weights", "kv_cache") are off the GPU."""
        if not tags:
            return 0
        return self.cache * ("kv_cache" in tags) + self.weights * ("weights" in tags) + self.work


def engine_memory(
    settings: Vllm, model: ModelNumbers, width: int, longest: int, gpu: Gpu, *, samples: bool
) -> EngineMemory:
    """Return the memory of an engine.

    width: bytes per element, for weights and for the KV cache. longest: positions of the longest sequence.
    samples: False for an engine that scores with the pooler's head.
    """
    parallel = settings.tensor_parallel_size
    own_head = not samples and (parallel > 1 or not model.tied)
    inside = model.parameters - model.head_parameters * (own_head and not model.tied)
    weights, head = -(-width * inside // parallel), width * model.head_parameters * own_head
    position = model.kv_bytes(width, parallel)
    least = position * (longest + BLOCK)
    if settings.kv_cache_bytes is not None:
        cache = settings.kv_cache_bytes
    elif settings.gpu_memory_share is not None:
        cache = int(settings.gpu_memory_share * gpu.total) - weights - WORK
    elif samples:
        cache = max(least, (gpu.room - weights - WORK) // SAMPLING_PART)
    else:
        cache = least + position * BATCH
    return EngineMemory(weights, head, cache, least)


def vllm_arguments(
    settings: Vllm, memory: EngineMemory, gpu: Gpu, *, sleeps: bool, samples: bool
) -> dict[str, Any]:
    """Return the memory arguments of vllm.LLM. It fails unless the share gpu_memory_utilization is free."""
    if settings.gpu_memory_share is not None and settings.kv_cache_bytes is None:
        return {"gpu_memory_utilization": settings.gpu_memory_share}
    least, room = memory.total - memory.work, gpu.free if sleeps else gpu.room
    if least > room:
        text = f"a vLLM engine takes {least / GIB:.1f} GiB of weights and cache, expected at most"
        raise ValueError(f"{text} {room / GIB:.1f} beside sleeping engines (see examples/plan.py)")
    if samples and settings.kv_cache_bytes is None:
        return {"gpu_memory_utilization": min(memory.inside, gpu.free) / gpu.total}
    return {"gpu_memory_utilization": memory.weights / gpu.total, "kv_cache_memory_bytes": memory.cache}
