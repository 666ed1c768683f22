"""The vLLM engines that a recipe's runs make on one GPU, one after another, by the engines' own rule.

None is ever dropped: those of earlier runs stay, asleep or beside all the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from smopd.config.settings import Settings
from smopd.engine.settings import Vllm
from smopd.engine.vllm.engines import SAMPLES
from smopd.engine.vllm.memory import GIB, EngineMemory, Gpu, engine_memory
from smopd.plan.machine import WIDTHS, trained_parameters
from smopd.plan.models import Models, ModelSizes

TEACHERS, REFERENCE = "teachers", "reference"


@dataclass(frozen=True)
class Asked:
    """An engine that a run works with."""

    role: str
    model: ModelSizes
    vllm: Vllm
    width: int
    longest: int
    """Positions of its longest sequence."""
    pooled: bool = False
    adapters: int = 0
    """Bytes of the adapters that it holds."""

    @property
    def key(self) -> tuple:
        """Of engines with one key a process has one."""
        kind = (self.model.kind, self.model.parameters, self.width, self.adapters > 0)
        return (self.role, *kind, repr(self.vllm))

    @property
    def samples(self) -> bool:
        return self.role == SAMPLES

    @property
    def colocated(self) -> bool:
        return self.vllm.placement == "colocated"


@dataclass(frozen=True)
class Made:
    asked: Asked
    taken: EngineMemory
    sleeps: bool

    @property
    def weights(self) -> int:
        return (
            self.taken.weights + self.taken.head + self.asked.adapters // self.asked.vllm.tensor_parallel_size
        )

    @property
    def total(self) -> int:
        return self.weights + self.taken.cache + self.taken.work


def asked(settings: Settings, models: Models) -> list[Asked]:
    """The engines of one run (resolved settings), in the order in which they are made."""
    rollout, teachers, data = settings.rollout, settings.teachers, settings.data
    engines = []
    if rollout.engine == "vllm" and not rollout.urls:
        width, adapters = WIDTHS[rollout.dtype], 0
        if settings.student.lora is not None:
            adapters = width * trained_parameters(settings, models.student)
        longest = rollout.vllm.max_model_len or settings.longest_sequence
        engines.append(Asked(SAMPLES, models.student, rollout.vllm, width, longest, adapters=adapters))
    if teachers.engine == "vllm":
        width = WIDTHS[teachers.dtype]
        longest = teachers.vllm.max_model_len or data.max_prompt_tokens + rollout.max_new_tokens
        slots = min(teachers.vllm.engines or len(models.teachers), len(models.teachers))
        held = [(f"{TEACHERS}/{i % slots}", sizes) for i, sizes in enumerate(models.teachers)]
        if models.reference is not None:
            held.append((f"{REFERENCE}/0", models.reference))
        adapters = width * models.adapter_parameters
        for role, sizes in held:
            pooled = teachers.route != "prompt_logprobs"
            one = Asked(role, sizes, teachers.vllm, width, longest, pooled, adapters)
            if one.key not in [other.key for other in engines]:
                engines.append(one)
            adapters = 0  # their base comes first
    return engines


def make(wanted: Iterable[Asked], there: Sequence[Made], free: int, total: int) -> list[Made]:
    """`there` and what `wanted` adds to it.

    Args:
        free: bytes of the GPU that the student leaves before its first update, engines not counted.
    Raises:
        ValueError: vLLM makes no such engine.
    """
    made = list(there)
    for one in wanted:
        if any(other.asked.key == one.key for other in made):
            continue
        beside = [other for other in made if other.asked.colocated and one.colocated]
        sizes = {other.asked.vllm.tensor_parallel_size for other in beside} | {one.vllm.tensor_parallel_size}
        if len(sizes) > 1:
            raise ValueError(f"vllm.tensor_parallel_size: got {sorted(sizes)}, expected one in a process")
        sleeps = one.vllm.sleep and not any(other.sleeps for other in beside)
        awake = sum(other.total for other in made if not other.sleeps)
        gpu = Gpu(free - awake, total, sum(other.total for other in made if other.sleeps))
        kind = {"samples": one.samples, "pooled": one.pooled}
        taken = engine_memory(one.vllm, one.model, one.width, one.longest, gpu, **kind)
        if taken.cache < taken.least:
            raise ValueError(
                f"{one.role}: {taken.cache / GIB:.2f} GiB of cache by vllm.kv_cache_bytes or "
                f"vllm.gpu_memory_share, expected at least {taken.least / GIB:.2f}, one longest sequence"
            )
        made.append(Made(one, taken, sleeps))
    return made
