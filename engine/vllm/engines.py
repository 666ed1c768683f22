"""vLLM engines. An engine is created once per role, and then its weights are replaced in place.

A colocated engine runs in the training process of every rank. Other engines run in their own processes. All
engines are kept until the training process ends, because garbage collection of an engine destroys the
caller's process group.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import InvalidStateError
from contextlib import contextmanager, nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from smopd.engine import distributed
from smopd.engine.errors import NoServer
from smopd.engine.process import CALLER, interrupts_withheld
from smopd.engine.settings import Vllm
from smopd.engine.vllm.memory import EngineMemory, Gpu, engine_memory, vllm_arguments
from smopd.engine.weights.architecture import Architecture, Checked, architecture_of, identity, stored
from smopd.engine.weights.transport import send

if TYPE_CHECKING:
    from vllm import LLM

T = TypeVar("T")

EXPERTS = re.compile(r"experts|moe")
CPU_KV_CACHE_BYTES = 256 << 20  # ours: vLLM's default takes most of the memory
SAMPLES = "rollout"
"""The role of the engine that samples."""
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

log = logging.getLogger(__name__)


class LostWeights(RuntimeError):
    """An engine does not have a complete set of weights."""


@dataclass(eq=False)
class Engine:
    """A vLLM engine made by `engine`.

    Attributes:
        sleeps: whether the engine leaves the GPU between uses.
        memory: its GPU memory, or None on a CPU.
        holds: `identity` of the files that its weights come from, or None if they do not come from files.
        asleep: the subset of {"weights", "kv_cache"} that is off the GPU now.
        trouble: why the engine cannot serve, or "".
        broken: whether vLLM failed during a load, so that later loads may be silently wrong.
    """

    llm: LLM
    settings: Vllm
    architecture: Architecture
    sleeps: bool
    memory: EngineMemory | None
    holds: str | None = None
    asleep: set[str] = field(default_factory=set)
    trouble: str = ""
    broken: bool = False

    @contextmanager
    def awake(self) -> Iterator[LLM]:
        """Keep weights and cache on the GPU in the context. Raise LostWeights if the last load failed."""
        with exclusive(self.settings):
            if self.trouble:
                raise LostWeights(f"the engine lacks a complete set of weights ({self.trouble})")
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
            torch.cuda.empty_cache()
            self.llm.wake_up(tags=sorted(tags))
            self.asleep = self.asleep - tags

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the weights by a stream of full tensors, equal on all ranks, and clear the prefix cache.

        After an error in `weights` (ValueError if one is missing, unknown or misshapen), the engine refuses
        to serve until a load succeeds. After an error in vLLM or the transfer, all loads raise LostWeights.
        """
        if self.broken:
            raise LostWeights(self.trouble)
        _require_replaceable(self.architecture)
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
def exclusive(settings: Vllm) -> Iterator[None]:
    """Let only one colocated engine run at a time, because vLLM's forward context is global.

    Raise NoServer if the process of an engine has ended.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    with _working if settings.placement == "colocated" else nullcontext():
        try:
            yield
        except EngineDeadError as error:
            raise NoServer("vLLM: the engine's own process has ended; it may have printed why") from error


def engine(role: str, path: str | Path, settings: Vllm, **options: Any) -> Engine:
    """Return the role's engine with the weights at `path`, a folder or hub id.

    If colocated, this is a collective call. An existing engine of the same role, architecture, settings and
    options is reused. Creating an engine preserves random state, environment, thread count and logging.

    Args:
        role: SAMPLES or another name, such as "teachers". Roles never share an engine.
        options: arguments of vllm.LLM that override the settings.
    """
    path = str(Path(path).expanduser()) if str(path).startswith("~") else str(path)
    files = identity(path)
    architecture = _architecture(path, files)
    key = (role, architecture.identity, repr(settings), repr(sorted(options.items())))
    made = _engines.get(key)
    if made is None:
        made = _engines[key] = _make(role, path, settings, architecture, options)
    elif made.holds != files:
        made.load(stored(path, architecture))
        made._wake(made.asleep)  # because a new engine is awake, too
    made.holds = files
    return made


def of_sharing_ranks(settings: Vllm, own: T) -> tuple[list[T], int]:
    """Gather `own` of the ranks that share a model (a collective call). Also return this rank's index."""
    if settings.placement == "process" or settings.tensor_parallel_size == 1:
        return [own], 0
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    gathered: list[Any] = [None] * group.world_size
    dist.all_gather_object(gathered, own, group=group.cpu_group)
    return gathered, group.rank_in_group


@cache
def _architecture(path: str, files: str) -> Architecture:
    """Return `architecture_of(path)`, cached until the files change."""
    with restoring_process_state():
        return architecture_of(path)


def warm_cache(path: str) -> None:
    """Read the architecture now. Reading it later in a thread would change all threads' default dtype."""
    _architecture(path, identity(path))


def _make(
    role: str, path: str, settings: Vllm, architecture: Architecture, options: dict[str, Any]
) -> Engine:
    _require_servable(settings)
    if role == SAMPLES:
        _require_replaceable(architecture)
    start, alone = time.perf_counter(), settings.placement == "process"
    # vLLM supports one sleeping engine per process.
    on_gpu = torch.cuda.is_available()
    sleeps = settings.sleep and on_gpu and (alone or not any(made.sleeps for made in _colocated()))
    with restoring_process_state(engine_environment(settings)):
        import vllm
        from vllm import envs

        envs.disable_envs_cache()  # an earlier engine enabled the cache
        arguments = _arguments(path, settings) | {"enable_sleep_mode": sleeps}
        memory = None
        if on_gpu:
            torch.cuda.empty_cache()
            asleep = sum(made.memory.asleep(made.asleep) for made in _engines.values() if made.memory)
            gpu = Gpu(*torch.cuda.mem_get_info(), asleep=asleep)
            width = getattr(torch, settings.dtype).itemsize
            longest = settings.max_model_len or architecture.numbers.positions
            samples = role == SAMPLES
            memory = engine_memory(settings, architecture.numbers, width, longest, gpu, samples=samples)
            arguments |= vllm_arguments(settings, memory, gpu, sleeps=sleeps, samples=samples)
        classes = _model_classes()
        with interrupts_withheld() if alone else nullcontext():
            llm = vllm.LLM(**deepcopy(arguments | options))  # vLLM changes its arguments
    if alone:
        _fail_when_process_ends(llm)
    else:  # vLLM's finalizer needs the process group, which is gone at exit
        _give_back(llm, classes)
        llm.llm_engine.engine_core._finalizer.atexit = False
    seconds = time.perf_counter() - start
    log.info("vLLM %s, %s engine for %s in %.1f s: %s", vllm.__version__, role, path, seconds, settings)
    return Engine(llm, settings, architecture, sleeps, memory)


def _fail_when_process_ends(llm: LLM) -> None:
    """Fail pending requests when the engine's process ends. vLLM's client alone would wait forever."""
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


def _model_classes() -> dict[Any, tuple[tuple[type, ...], dict[str, Any]]]:
    """Return the bases and attributes of each loaded model class of transformers."""
    found: list[Any] = [PreTrainedModel]
    for cls in found:
        found += cls.__subclasses__()
    return {cls: (cls.__bases__, dict(vars(cls))) for cls in found}


def _give_back(llm: LLM, before: Mapping[Any, tuple[tuple[type, ...], dict[str, Any]]]) -> None:
    """Undo vLLM's changes to transformers' classes, and give vLLM's modules subclasses with these changes.

    Otherwise the trainer's models, which are instances of the same classes, could no longer be called.
    """
    theirs: dict[type, type] = {}
    for cls, (bases, own) in before.items():
        if cls.__bases__ != bases:
            added = tuple(base for base in cls.__bases__ if base not in bases)
            changed = {name: value for name, value in vars(cls).items() if own.get(name) is not value}
            cls.__bases__ = bases
            for name in changed:
                setattr(cls, name, own[name]) if name in own else delattr(cls, name)
            theirs[cls] = type(cls.__name__, (cls, *added), changed)

    def adopt(model: nn.Module) -> None:
        for module in model.modules():
            module.__class__ = theirs.get(type(module), type(module))

    if theirs:
        llm.apply_model(adopt)


def _require_replaceable(architecture: Architecture) -> None:
    """Raise ValueError for a mixture of experts on a CPU, where vLLM 0.32 packs the weights irreversibly."""
    if not torch.cuda.is_available() and any(EXPERTS.search(name) for name in architecture.shapes):
        expected = "expected `local`, or a server with a GPU at rollout.urls"
        raise ValueError(f"vLLM does not replace the weights of experts on a CPU; {expected}")


def _require_servable(settings: Vllm) -> None:
    ranks, parallel = distributed.world_size(), settings.tensor_parallel_size
    if settings.placement == "process":
        if parallel > 1 and ranks > 1:
            got = f"got {parallel} for a process on each of {ranks} ranks"
            raise ValueError(f"tensor_parallel_size: {got}, expected 1, or placement colocated")
        return
    if not dist.is_initialized():
        raise RuntimeError("a colocated vLLM engine needs a process group (engine.distributed.process_group)")
    if ranks % parallel:
        raise ValueError(f"tensor_parallel_size: got {parallel}, expected a divisor of the {ranks} ranks")
    others = {made.settings.tensor_parallel_size for made in _colocated()}
    if others - {parallel}:
        raise ValueError(f"tensor_parallel_size: got {parallel}, expected {others.pop()} as in this process")


def _arguments(path: str, settings: Vllm) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": path,
        "dtype": settings.dtype,
        "enable_prefix_caching": True,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "use_tqdm_on_load": False,
    }
    given = {name: value for name, value in settings.engine_kwargs.items() if value is not None}
    if not torch.cuda.is_available():
        given.pop("gpu_memory_utilization", None)
        arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": CPU_KV_CACHE_BYTES}
        # If a prompt is split, vLLM resets the generator of a seeded request, which fails on a CPU.
        arguments["enable_chunked_prefill"] = False
    if settings.placement == "process":
        from smopd.engine.vllm.transfer import BACKEND, EXTENSION

        arguments["worker_extension_cls"] = EXTENSION
        arguments["weight_transfer_config"] = {"backend": BACKEND}
    elif distributed.world_size() > 1:
        arguments["distributed_executor_backend"] = "external_launcher"
    return arguments | given


def _colocated() -> list[Engine]:
    return [made for made in _engines.values() if made.settings.placement == "colocated"]


def engine_environment(settings: Vllm) -> dict[str, str | None]:
    """Return environment variables for the creation of an engine. None unsets a variable."""
    alone = settings.placement == "process"
    defaults = {
        "VLLM_CONFIGURE_LOGGING": "1" if alone else "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    values: dict[str, str | None] = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if alone else "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        **{name: os.environ.get(name, value) for name, value in defaults.items()},
    }
    on_gpu, local_rank = torch.cuda.is_available(), os.environ.get("LOCAL_RANK", "0")
    if not on_gpu:
        values["TORCHDYNAMO_DISABLE"] = "1"  # saves ten seconds of compilation at the first call
    if alone:
        values |= {**dict.fromkeys(LAUNCHER), CALLER: str(os.getpid())}
        if on_gpu and settings.tensor_parallel_size == 1:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            devices = visible.split(",") if visible else list(map(str, range(torch.cuda.device_count())))
            values["CUDA_VISIBLE_DEVICES"] = devices[int(local_rank) % len(devices)]
    elif dist.is_initialized():
        values |= {"RANK": str(distributed.rank()), "LOCAL_RANK": local_rank}
    return values


@contextmanager
def restoring_process_state(environment: dict[str, str | None] | None = None) -> Iterator[None]:
    """Restore RNG states, environment, thread count and logging, which vLLM changes."""
    import torch._dynamo  # before the environment changes: this import reads it

    old_environment = dict(os.environ)
    old_random, old_numpy = random.getstate(), np.random.get_state()
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    matmul_precision = torch.get_float32_matmul_precision()
    record_factory = logging.getLogRecordFactory()
    theirs = logging.getLogger("vllm")
    if environment and theirs.level == logging.NOTSET:
        theirs.setLevel(environment["VLLM_LOGGING_LEVEL"] or logging.ERROR)
    level, handlers, propagate = theirs.level, theirs.handlers[:], theirs.propagate
    for name, value in (environment or {}).items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    try:
        with torch.random.fork_rng(gpus):
            yield
    finally:
        os.environ.clear()
        os.environ.update(old_environment)
        random.setstate(old_random)
        np.random.set_state(old_numpy)
        torch.set_num_threads = set_num_threads
        set_num_threads(num_threads)
        torch.set_float32_matmul_precision(matmul_precision)
        logging.setLogRecordFactory(record_factory)
        theirs.level, theirs.handlers, theirs.propagate = level, handlers, propagate
        gc.unfreeze()  # vLLM freezes the caller's objects, so that they would never be collected
