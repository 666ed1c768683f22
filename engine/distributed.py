"""Process group, device and collective calls, with or without torchrun."""

import ctypes
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from smopd.engine.errors import Failure
from smopd.engine.process import tell

T = TypeVar("T")

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGEST_KEPT = 32 << 20  # bytes, the largest threshold that glibc accepts
_MOST_KEPT = 2**31 - 1  # bytes
_SET_UP = timedelta(minutes=30)  # long, because all ranks wait while one rank downloads a model
# Device meshes and DeepSpeed keep the gloo threads of a destroyed group alive. If such a thread frees a
# tensor while Python exits, it requests the GIL, which aborts the process.
_DRAIN_SECONDS = 0.1
_COLLECTIVES = tuple(os.path.join(*parts) for parts in (("torch", "distributed"), ("deepspeed", "comm")))
_BEATS = 10  # ours: heartbeat intervals in the longest allowed silence
_LEFT = 1 << 40  # a rank adds this to its count when it stops sending heartbeats


@contextmanager
def process_group() -> Iterator[torch.device]:
    """Join torchrun's process group, or create a group of size 1. Yield this process's device.

    Exit with a message if this machine has fewer GPUs than processes.
    """
    cuda, local = torch.cuda.is_available(), int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda and local >= (gpus := torch.cuda.device_count()):
        started = os.environ.get("LOCAL_WORLD_SIZE", "more")
        text = f"error: {started} processes for {gpus} GPUs; start one for each (torchrun --nproc-per-node)"
        raise SystemExit(text if local == gpus else 1)  # only one process prints the text
    if cuda:
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
    owned = not dist.is_initialized()
    if owned:
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        if "RANK" in os.environ:
            try:
                dist.init_process_group(backend, timeout=_SET_UP)
            except ValueError as error:
                raise SystemExit(f"error: RANK is set: {error}; use torchrun, or unset RANK") from None
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield device
    finally:
        if owned and dist.is_initialized():
            dist.destroy_process_group()
            time.sleep(_DRAIN_SECONDS)


@contextmanager
def watched(seconds: float) -> Iterator[None]:
    """End this process when another rank has been silent for `seconds`. The first to end prints an error.

    The silent rank may be suspended, or its host may be unreachable. Collective calls would notice this late,
    because their timeout is long: rewards and servers can be slow on one rank.
    """
    if world_size() == 1:
        yield
        return
    store: Any = dist.distributed_c10d._get_default_store()  # torch's type stubs lack `clone`
    store = store.clone()
    keys = [f"smopd/alive/{each}" for each in range(world_size())]
    quiet = dict.fromkeys(keys, 0)  # heartbeat intervals, not seconds, so that a suspended job survives
    done = threading.Event()

    def talk() -> None:
        counts: dict[str, int] = {}
        with suppress(RuntimeError):  # if the store is gone, every rank seems silent
            while not done.wait(seconds / _BEATS):
                for each, key in enumerate(keys):
                    count = store.add(key, int(each == rank()))
                    if count != counts.get(key) or count >= _LEFT:
                        counts[key], quiet[key] = count, 0

    def watch() -> None:
        while not done.wait(seconds / _BEATS):
            for key in keys:
                quiet[key] += 1
            silent = [each for each, key in enumerate(keys) if quiet[key] > _BEATS]
            if silent:
                cut_off = quiet[keys[rank()]] > 2  # the store does not answer, so even this rank seems silent
                lost = "the other ranks have" if cut_off else f"rank {silent[0]} has"
                if cut_off or store.add("smopd/failed", 1) == 1:
                    tell(f"error: {lost} given no sign of life for {seconds:g} seconds; rerun to resume")
                os._exit(1)

    for loop in (talk, watch):
        threading.Thread(target=loop, name="ranks", daemon=True).start()
    try:
        yield
    finally:
        with suppress(RuntimeError):
            store.add(keys[rank()], _LEFT)  # ranks that still work must not count this rank as silent
        done.set()


def in_collective(error: Exception) -> bool:
    """Return whether `error` comes from a collective call. Such a call fails when another rank is gone."""
    *_, last = traceback.extract_tb(error.__traceback__)
    return isinstance(error, dist.DistError) or any(each in last.filename for each in _COLLECTIVES)


class LostRank(Failure, RuntimeError):
    """Another rank did not reach a collective call in time."""


@contextmanager
def collective_timeout(seconds: float) -> Iterator[None]:
    """Set the timeout of every process group while the context is active.

    Raises:
        LostRank: a gloo collective timed out. With NCCL, a timeout ends the process instead.
    """
    _set_timeouts(timedelta(seconds=seconds))
    try:
        yield
    except RuntimeError as error:
        if "gloo" in str(error) and "Timed out" in str(error):
            raise LostRank(f"a rank did not answer for {seconds:g} s; end it and rerun to resume") from error
        raise
    finally:
        _set_timeouts(_SET_UP)


def is_lost(error: Exception) -> bool:
    """Return whether `error` is gloo's report of a lost connection to another rank."""
    return isinstance(error, RuntimeError) and "gloo/transport" in str(error)


def _set_timeouts(timeout: timedelta) -> None:
    if world_size() > 1:
        for group in list(dist.distributed_c10d._world.pg_map):
            dist.distributed_c10d._set_pg_timeout(timeout, group)


def keep_freed_memory() -> None:
    """Stop glibc from returning freed buffers to the system. Returning them costs page faults in every step.

    This has no effect if MALLOC_* or GLIBC_TUNABLES is set in the environment.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    chosen = [name for name in os.environ if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES"]
    if mallopt is not None and not chosen:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT)
        mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


@contextmanager
def thread(name: str, device: torch.device) -> Iterator[ThreadPoolExecutor]:
    """Yield a one-thread executor that computes on `device`. On exit, cancel its pending work."""
    begin = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
    pool = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=begin)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def barrier() -> None:
    if world_size() > 1:
        dist.barrier()


def all_reduce(value: Tensor, op: str = "sum") -> Tensor:
    """Reduce `value` over all ranks by "sum", "max" or "min", and return the result as a new tensor."""
    value = value.clone()
    if world_size() > 1:
        dist.all_reduce(value, op=getattr(dist.ReduceOp, op.upper()))
    return value


def gather_objects(value: object) -> list:
    """Return the `value` of every rank, in rank order."""
    gathered: list = [value] * world_size()
    if len(gathered) > 1:
        dist.all_gather_object(gathered, value)
    return gathered


def on_rank0(function: Callable[[], T], *, of_host: bool = False) -> T:
    """Run `function` on rank 0 or, if `of_host`, on the first rank of each host. This is a collective call.

    Every rank returns the result of rank 0 (or of its host's first rank). If `function` raised an exception
    on any rank, every rank raises that exception.
    """
    value, error = None, None
    before = int(os.environ.get("LOCAL_RANK", "0")) if of_host else rank()
    if before == 0:
        try:
            value = function()
        except Exception as raised:
            error = raised
    results = gather_objects((value, error))
    for _, error in results:
        if error is not None:
            raise error
    return results[rank() - before][0]


def all_or_raise(function: Callable[[], T], errors: tuple[type[Exception], ...]) -> T:
    """Run `function` on every rank. If it raises one of `errors` on a rank, every rank raises that exception.

    This is a collective call. `function` itself must not make collective calls.
    """
    error: Exception | None = None
    try:
        value = function()
    except errors as raised:
        error = raised
    if int(all_reduce(torch.tensor(int(error is not None)), "max")):
        raise next(found for found in [error, *gather_objects(error)] if found is not None)
    return value


def first_to_fail() -> bool:
    """Return whether this rank is the first to call this function, so that only one rank prints an error."""
    if world_size() == 1:
        return True
    try:
        return dist.distributed_c10d._get_default_store().add("smopd/failed", 1) == 1
    except RuntimeError:  # the rank that hosts the store is gone and has printed its error
        return False


def broadcast_object(value: Any) -> Any:
    """Return rank 0's `value` on every rank."""
    return on_rank0(lambda: value)
