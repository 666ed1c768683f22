"""vLLM engines, one for each role: created once, kept, and given new weights in place.

Colocated engines live in this process, one on every rank; others have a process of their own. Engines are
never dropped: collecting one destroys the caller's process group.
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

log = logging.getLogger(__name__)


class LostWeights(RuntimeError):
    """An engine does not hold a complete set of weights."""


@dataclass(eq=False)
class Engine:
    """One engine of vLLM, as `engine` makes it.

    Attributes:
        holds: identity of the files whose weights it has; None: other weights.
        sleeps: whether it leaves the GPU while others work.
        taken: GPU memory, where there is a GPU.
        asleep: what is not on the GPU now, "weights" and "kv_cache".
        trouble: why it cannot serve.
        broken: vLLM failed in the middle of a load: later loads may be silently wrong.
    """

    llm: LLM
    settings: VllmSettings
    architecture: Architecture
    sleeps: bool
    taken: EngineMemory | None
    holds: str | None = None
    asleep: set[str] = field(default_factory=set)
    trouble: str = ""
    broken: bool = False

    @contextmanager
    def awake(self) -> Iterator[LLM]:
        """Weights and cache are on the GPU within it, and leave it afterwards if the engine sleeps.

        Raises:
            LostWeights: the last load of weights failed.
            NoServer: the engine's own process has ended.
        """
        with exclusive(self.settings):
            if self.trouble:
                raise LostWeights(f"the engine holds no whole set of weights ({self.trouble})")
            self._wake(self.asleep)
            try:
                yield self.llm
            finally:
                self.sleep()

    def sleep(self) -> None:
        if self.sleeps and not self.asleep:
            self.llm.sleep(level=1)
            self.asleep = {"weights", "kv_cache"}

    def _wake(self, tags: set[str]) -> None:
        if tags:
            torch.cuda.empty_cache()  # torch's cached memory is not free
            self.llm.wake_up(tags=sorted(tags))
            self.asleep = self.asleep - tags

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replaces the weights, one tensor at a time, and clears the prefix cache.

        Args:
            weights: full tensors by their transformers names; a tied head may be omitted. Colocated, every
                rank gives the same stream. It is read to its end, or to the first wrong weight.
        Raises:
            ValueError: a weight is missing, unknown or of another shape. After this, as after any error of
                `weights`, the engine refuses to serve until a load succeeds.
            LostWeights: vLLM itself failed in an earlier load; the engine is unusable.
            NoServer: the engine's own process has ended.
        """
        if self.broken:
            raise LostWeights(self.trouble)
        checked = Checked(self.architecture, weights)
        with exclusive(self.settings):
            self._wake(self.asleep & {"weights"})
            self.holds, self.broken = None, True
            self.trouble = "vLLM failed while it replaced the engine's weights"
            if self.settings.placement == "process":
                send(self.llm, checked, "files")
            else:
                self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(checked)})
            self.broken, self.trouble = False, str(checked.error or "")
            self.llm.reset_prefix_cache()
        if checked.error is not None:
            raise checked.error


_engines: dict[tuple, Engine] = {}
_working = threading.RLock()


@contextmanager
def exclusive(settings: VllmSettings) -> Iterator[None]:
    """Keeps colocated engines from working at once: vLLM's forward context is one for the process.

    Raises:
        NoServer: the engine had a process of its own, which has ended.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    with _working if settings.placement == "colocated" else nullcontext():
        try:
            yield
        except EngineDeadError as error:
            raise NoServer("vLLM: the engine's own process has ended; it may have printed why") from error


def engine(role: str, path: str | Path, settings: VllmSettings, **options: Any) -> Engine:
    """The engine of `role` with the weights at `path`: a new one, or the existing one with new weights.

    A role has one engine for each combination of architecture, settings and options. Creating one leaves the
    caller's random state, environment, threads and logging unchanged. Colocated, this is a collective call.

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
        made = _engines[key] = _make(role, path, settings, architecture, options)
    elif made.holds != files:
        made.load(stored(path, architecture))
        made._wake(made.asleep)  # as a new engine is, so that its owner can put it to sleep
    made.holds = files
    return made


def of_sharing_ranks(settings: VllmSettings, own: T) -> tuple[list[T], int]:
    """`own` of each rank that shares a model, and this rank's place among them; a collective call."""
    if settings.placement == "process" or settings.tensor_parallel_size == 1:
        return [own], 0
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    gathered: list[Any] = [None] * group.world_size
    dist.all_gather_object(gathered, own, group=group.cpu_group)
    return gathered, group.rank_in_group


@cache
def _architecture(path: str, files: str) -> Architecture:
    """Cached for each state of the files: computing it changes torch's default dtype for a moment."""
    with restoring_process_state():
        return architecture_of(path)


def warm_cache(path: str) -> None:
    """Reads the architecture at `path` now, so that a later `engine` in another thread does not."""
    _architecture(path, identity(path))


def _make(
    role: str, path: str, settings: VllmSettings, architecture: Architecture, options: dict[str, Any]
) -> Engine:
    _require_servable(settings)
    start, alone = time.perf_counter(), settings.placement == "process"
    # vLLM's sleep allocator serves a single engine of a process.
    sleeps = settings.sleep and _cuda() and (alone or not any(made.sleeps for made in _colocated()))
    with restoring_process_state(engine_environment(settings)):
        import vllm
        from vllm import envs

        envs.disable_envs_cache()  # an earlier engine enabled it
        arguments, taken = _arguments(path, settings), None
        if _cuda():
            torch.cuda.empty_cache()  # torch's cached memory is not free
            gpu = Gpu(*torch.cuda.mem_get_info(), asleep=_asleep_bytes())
            width = getattr(torch, settings.dtype).itemsize
            longest = settings.max_model_len or architecture.numbers.positions
            samples = role == SAMPLES
            taken = engine_memory(settings, architecture.numbers, width, longest, gpu, samples=samples)
            arguments |= vllm_arguments(settings, taken, gpu, sleeps=sleeps, samples=samples)
            arguments["enable_sleep_mode"] = sleeps
        with interrupts_withheld() if alone else nullcontext():
            # vLLM changes its arguments; the originals are the key
            llm = vllm.LLM(**deepcopy(arguments | options))
    if alone:
        _fail_when_process_ends(llm)
    else:  # at exit it would leave a process group that is gone by then
        llm.llm_engine.engine_core._finalizer.atexit = False
    seconds = time.perf_counter() - start
    log.info("vLLM %s, %s engine for %s in %.1f s: %s", vllm.__version__, role, path, seconds, settings)
    return Engine(llm, settings, architecture, sleeps, taken)


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


def _require_servable(settings: VllmSettings) -> None:
    ranks, parallel = distributed.world_size(), settings.tensor_parallel_size
    if settings.placement == "process":
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
    others = {made.settings.tensor_parallel_size for made in _colocated()}
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
        arguments |= {"max_lora_rank": settings.max_lora_rank, "max_loras": settings.max_loras}
    if settings.placement == "process":
        from smopd.engine.vllm.transfer import BACKEND, EXTENSION

        arguments["worker_extension_cls"] = EXTENSION
        arguments["weight_transfer_config"] = {"backend": BACKEND}
    elif distributed.world_size() > 1:
        arguments["distributed_executor_backend"] = "external_launcher"
    return arguments | settings.more


def _colocated() -> list[Engine]:
    return [made for made in _engines.values() if made.settings.placement == "colocated"]


def _asleep_bytes() -> int:
    return sum(made.taken.asleep(made.asleep) for made in _engines.values() if made.taken)


def _cuda() -> bool:
    return torch.cuda.is_available()
