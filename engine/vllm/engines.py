"""vLLM engines, one for each role: created once, kept, and given new weights in place.

Colocated engines live in this process, one on every rank; others have a process of their own. Creating one
leaves the caller's random state, environment, threads and logging unchanged. Engines are never dropped:
collecting one destroys the caller's process group.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import InvalidStateError
from contextlib import contextmanager, nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from smopd.engine import distributed
from smopd.engine.errors import NoServer
from smopd.engine.models.sizes import ModelNumbers
from smopd.engine.process import interrupts_withheld
from smopd.engine.settings import VllmSettings
from smopd.engine.vllm.environment import engine_environment, restoring_process_state
from smopd.engine.vllm.memory import EngineMemory, Gpu, engine_memory, vllm_arguments
from smopd.engine.weights.architecture import Architecture, Checked, architecture_of, identity, stored
from smopd.engine.weights.transport import send

if TYPE_CHECKING:
    from vllm import LLM

T = TypeVar("T")

CPU_KV_CACHE_BYTES = 256 << 20  # ours: vLLM's default takes most of the memory
SAMPLES = "rollout"
"""The role that samples; the others only score."""
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # supported by vLLM

log = logging.getLogger(__name__)


class LostWeights(RuntimeError):
    """An engine does not hold a complete set of weights."""


@dataclass
class _Engine:
    """An engine and its state."""

    llm: LLM
    settings: VllmSettings
    architecture: Architecture
    holds: str | None
    """Identity of the files whose weights it has; None: other weights."""
    trouble: str = ""
    """Why it cannot serve."""
    broken: bool = False
    """vLLM failed in the middle of a load: later loads may be silently wrong."""
    sleeps: bool = False
    """Whether it leaves the GPU while others work."""
    taken: EngineMemory | None = None
    """GPU memory, where there is a GPU."""
    asleep: set[str] = field(default_factory=set)


_engines: dict[tuple, _Engine] = {}
_working = threading.RLock()


def engine(role: str, path: str | Path, settings: VllmSettings, **options: Any) -> LLM:
    """The engine of `role` with the weights at `path`: a new one, or the existing one with new weights.

    A role has one engine for each combination of architecture, settings and options. Colocated, this is a
    collective call.

    Args:
        role: SAMPLES, "teachers", ...; two roles never share an engine.
        path: a folder or hub id.
        options: for vllm.LLM, over what the settings say.
    Raises:
        ValueError: this launch does not support the settings, or the GPU has too little memory.
        RuntimeError: colocated without a process group.
    """
    path = str(Path(path).expanduser()) if str(path).startswith("~") else str(path)
    files = identity(path)
    architecture = _architecture(path, files)
    key = (role, architecture.identity, settings, repr(sorted(options.items())))
    made = _engines.get(key)
    if made is None:
        sleeps = _can_sleep(settings)
        llm, taken = _make(role, path, settings, architecture.numbers, sleeps, options)
        made = _engines[key] = _Engine(llm, settings, architecture, files, sleeps=sleeps, taken=taken)
    elif made.holds != files:
        load(made.llm, stored(path, architecture))
        made.holds = files
    wake_up(made.llm)
    return made.llm


@cache
def _architecture(path: str, files: str) -> Architecture:
    """Cached for each state of the files: computing it changes torch's default dtype for a moment."""
    with restoring_process_state():
        return architecture_of(path)


def warm_cache(path: str | Path) -> None:
    """Reads the architecture at `path` now, so that a later `engine` in another thread does not."""
    _architecture(str(path), identity(str(path)))


def load(llm: LLM, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Replaces an engine's weights, one tensor at a time, and clears its prefix cache.

    Args:
        weights: full tensors by their transformers names; a tied head may be omitted. Colocated, every rank
            gives the same stream. It is read to its end, or to the first wrong weight.
    Raises:
        ValueError: a weight is missing, unknown or of another shape. After this, as after any error of
            `weights`, the engine refuses to serve until a load succeeds.
        LostWeights: vLLM itself failed in an earlier load; the engine is unusable.
    """
    made = _of(llm)
    if made.broken:
        raise LostWeights(made.trouble)
    if "weights" in made.asleep:
        _wake(made, {"weights"})
    made.holds, made.broken, made.trouble = None, True, "vLLM failed while it replaced the engine's weights"
    checked = Checked(made.architecture, weights)
    if made.settings.placement == "process":
        send(llm, checked, made.settings.transfer)
    else:
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(checked)})
    made.broken, made.trouble = False, str(checked.error or "")
    llm.reset_prefix_cache()
    if checked.error is not None:
        raise checked.error


@contextmanager
def exclusive(settings: VllmSettings) -> Iterator[None]:
    """Keeps colocated engines from working at once: vLLM's forward context is one for the whole process.

    Raises:
        NoServer: the engine had a process of its own, which has ended.
    """
    if settings.placement == "colocated":
        with _working:
            yield
        return
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError as error:
        raise NoServer("vLLM: the engine's own process has ended; it may have printed why") from error


def of_sharing_ranks(settings: VllmSettings, own: T) -> tuple[list[T], int]:
    """`own` of each rank that shares a model, and this rank's place among them; a collective call."""
    if settings.placement == "process" or settings.tensor_parallel_size == 1:
        return [own], 0
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    gathered: list[Any] = [None] * group.world_size
    dist.all_gather_object(gathered, own, group=group.cpu_group)
    return gathered, group.rank_in_group


def _fail_when_process_ends(llm: LLM) -> None:
    """Fails pending requests when the engine's process ends; vLLM's client would wait forever."""
    from vllm.v1.engine.exceptions import EngineDeadError

    client: Any = llm.llm_engine.engine_core
    ends = [process.sentinel for process in client.resources.engine_manager.processes]

    def answer() -> None:
        wait(ends)
        client.resources.engine_dead = True  # later requests are refused
        client.outputs_queue.put(EngineDeadError())
        for waited_for in list(client.utility_results.values()):
            with suppress(InvalidStateError):  # answered in the meantime
                waited_for.set_exception(EngineDeadError())

    threading.Thread(target=answer, name="engine-end", daemon=True).start()


def wake_up(llm: LLM) -> None:
    """Brings weights and cache back to the GPU where the engine sleeps.

    Raises:
        LostWeights: its last load of weights failed.
    """
    made = _of(llm)
    if made.trouble:
        raise LostWeights(f"the engine holds no whole set of weights ({made.trouble})")
    if made.asleep:
        _wake(made, made.asleep)


def _wake(made: _Engine, tags: set[str]) -> None:
    torch.cuda.empty_cache()  # torch's cached memory is not free
    made.llm.wake_up(tags=sorted(tags))
    made.asleep = made.asleep - tags


def sleep(llm: LLM) -> None:
    """Moves weights to main memory and drops the cache, where settings and device allow it."""
    made = _of(llm)
    if made.sleeps and not made.asleep:
        llm.sleep(level=1)
        made.asleep = {"weights", "kv_cache"}


def _can_sleep(settings: VllmSettings) -> bool:
    """vLLM's sleep allocator serves a single engine of a process."""
    taken = any(made.sleeps and made.settings.placement == "colocated" for made in _engines.values())
    return settings.sleep and _cuda() and (settings.placement == "process" or not taken)


def _make(
    role: str, path: str, settings: VllmSettings, model: ModelNumbers, sleeps: bool, options: dict[str, Any]
) -> tuple[LLM, EngineMemory | None]:
    _require_servable(settings)
    start = time.perf_counter()
    with restoring_process_state(engine_environment(settings)):
        import vllm
        from vllm import envs

        envs.disable_envs_cache()  # an earlier engine enabled it
        arguments, taken = _arguments(path, settings), None
        if _cuda():
            own, taken = _memory(role, settings, model, sleeps, options)
            arguments |= {**own, "enable_sleep_mode": sleeps}
        arguments |= options
        with interrupts_withheld() if settings.placement == "process" else nullcontext():
            llm = vllm.LLM(**deepcopy(arguments))  # vLLM changes its arguments; the originals are the key
    if settings.placement == "process":
        _fail_when_process_ends(llm)
    else:  # at exit it would leave a process group that is gone by then
        llm.llm_engine.engine_core._finalizer.atexit = False
    held = llm.llm_engine.vllm_config.cache_config
    memory = (
        f"{held.kv_cache_memory_bytes >> 20} MiB of cache"
        if held.kv_cache_memory_bytes
        else (f"{held.gpu_memory_utilization:.0%} of the GPU")
    )
    log.info(
        "vLLM %s %s engine for %s: %s, tensor parallel %d, %s, %s, up to %d positions, made in %.1f s",
        vllm.__version__,
        role,
        path,
        "colocated" if settings.placement == "colocated" else "in its own process",
        settings.tensor_parallel_size,
        settings.dtype,
        memory,
        llm.model_config.max_model_len,
        time.perf_counter() - start,
    )
    return llm, taken


def _require_servable(settings: VllmSettings) -> None:
    ranks, parallel = distributed.world_size(), settings.tensor_parallel_size
    if settings.max_lora_rank > LORA_RANKS[-1]:
        raise ValueError(
            f"max_lora_rank: got {settings.max_lora_rank} (student.lora.rank), expected at most "
            f"{LORA_RANKS[-1]}, the largest that vLLM serves"
        )
    if settings.placement == "process":
        if settings.transfer == "ipc" and (parallel > 1 or not _cuda()):
            raise ValueError("transfer: ipc needs CUDA and an engine on a single GPU; expected files")
        if parallel > 1 and ranks > 1:
            raise ValueError(
                f"tensor_parallel_size: got {parallel} for engines in a process of their own, one on each of "
                f"{ranks} ranks, expected 1, or placement colocated"
            )
        return
    if not dist.is_initialized():
        raise RuntimeError("a colocated vLLM engine needs a process group (engine.distributed.process_group)")
    if ranks % parallel:
        raise ValueError(f"tensor_parallel_size: got {parallel}, expected a divisor of the {ranks} ranks")
    others = {
        made.settings.tensor_parallel_size
        for made in _engines.values()
        if made.settings.placement == "colocated"
    }
    if others - {parallel}:
        raise ValueError(
            f"tensor_parallel_size: got {parallel}, expected {others.pop()} as this process's other engines"
        )


def _arguments(path: str, settings: VllmSettings) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": path,
        "dtype": settings.dtype,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "max_model_len": settings.max_model_len,
        "enforce_eager": settings.enforce_eager or not _cuda(),
        "kv_cache_memory_bytes": settings.kv_cache_bytes,
        "enable_prefix_caching": True,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "use_tqdm_on_load": False,
    }
    if not _cuda():
        arguments["kv_cache_memory_bytes"] = settings.kv_cache_bytes or CPU_KV_CACHE_BYTES
        # A seeded request whose prompt is cut has its random state set back, which a CPU's cannot be.
        arguments["enable_chunked_prefill"] = False
    if settings.max_lora_rank:
        arguments["enable_lora"] = True
        arguments["max_lora_rank"] = next(rank for rank in LORA_RANKS if rank >= settings.max_lora_rank)
        arguments["max_loras"] = max(1, settings.max_loras)
    if settings.placement == "process":
        from smopd.engine.vllm.transfer import BACKENDS, EXTENSION

        arguments["worker_extension_cls"] = EXTENSION
        arguments["weight_transfer_config"] = {"backend": BACKENDS[settings.transfer]}
    elif distributed.world_size() > 1:
        arguments["distributed_executor_backend"] = "external_launcher"
    return arguments | settings.more


def _memory(
    role: str, settings: VllmSettings, model: ModelNumbers, sleeps: bool, options: dict[str, Any]
) -> tuple[dict[str, Any], EngineMemory]:
    torch.cuda.empty_cache()  # torch's cached memory is not free
    free, total = torch.cuda.mem_get_info()
    gpu = Gpu(free, total, sum(made.taken.asleep(made.asleep) for made in _engines.values() if made.taken))
    width, longest = getattr(torch, settings.dtype).itemsize, settings.max_model_len or model.positions
    samples, pooled = role == SAMPLES, options.get("runner") == "pooling"
    taken = engine_memory(settings, model, width, longest, gpu, samples=samples, pooled=pooled)
    return vllm_arguments(settings, taken, gpu, sleeps=sleeps, samples=samples), taken


def _of(llm: LLM) -> _Engine:
    for made in _engines.values():
        if made.llm is llm:
            return made
    raise ValueError("this engine was not made by smopd.engine.vllm.engines.engine")


def _cuda() -> bool:
    return torch.cuda.is_available()
