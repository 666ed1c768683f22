"""Processes and devices: one process group for one process and for torchrun alike."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGEST_KEPT = 32 << 20  # bytes; glibc takes no more
_MOST_KEPT = 2**31 - 1  # bytes
_SET_UP = timedelta(minutes=30)  # one rank may load or download what the others wait for
# Meshes and DeepSpeed keep a destroyed group's gloo threads. One that still frees a tensor when Python ends
# wants the GIL, and aborts the process.
_DRAIN_SECONDS = 0.1


@contextmanager
def process_group() -> Iterator[torch.device]:
    """Joins torchrun's group, or makes a group of one; yields this process's device and leaves at the end."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
    owned = not dist.is_initialized()
    if owned:
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        if "RANK" in os.environ:
            dist.init_process_group(backend, timeout=_SET_UP)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield device
    finally:
        if owned and dist.is_initialized():
            dist.destroy_process_group()
            time.sleep(_DRAIN_SECONDS)


class LostRank(RuntimeError):
    """A collective has waited in vain for another rank."""


@contextmanager
def collective_timeout(seconds: float) -> Iterator[None]:
    """Within it a collective fails that waits longer for another rank, in every group that there is.

    Raises:
        LostRank: gloo's did. NCCL ends the process itself.
    """
    _set_timeouts(timedelta(seconds=seconds))
    try:
        yield
    except RuntimeError as error:
        if "gloo" in str(error) and "Timed out" in str(error):
            raise LostRank(
                f"another rank has not answered for {seconds:g} seconds; end it and rerun to resume"
            ) from error
        raise
    finally:
        _set_timeouts(_SET_UP)


def _set_timeouts(timeout: timedelta) -> None:
    if world_size() > 1:
        for group in list(dist.distributed_c10d._world.pg_map):
            dist.distributed_c10d._set_pg_timeout(timeout, group)


def keep_freed_memory() -> None:
    """Keeps freed buffers in the process, which glibc hands back by default and every step faults in anew.

    MALLOC_* and GLIBC_TUNABLES in the environment go first.
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
    """One thread that computes on `device`; what has not begun when it ends is left out."""
    begin = partial(torch.cuda.set_device, device) if device.type == "cuda" else None  # a thread's own
    pool = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=begin)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def barrier() -> None:
    if world_size() > 1:
        dist.barrier()


def all_reduce(value: Tensor, op: str = "sum") -> Tensor:
    """`value` reduced over all ranks ("sum", "max" or "min"), a new tensor, the same on each."""
    value = value.clone()
    if world_size() > 1:
        dist.all_reduce(value, op=getattr(dist.ReduceOp, op.upper()))
    return value


def gather_objects(value: object) -> list:
    """Every rank's object, in rank order, on every rank."""
    gathered: list = [value] * world_size()
    if len(gathered) > 1:
        dist.all_gather_object(gathered, value)
    return gathered


def on_rank0(function: Callable[[], T]) -> T:
    """Rank 0's result of `function` on every rank; what it raises is raised on every rank."""
    value, error = None, None
    if rank() == 0:
        try:
            value = function()
        except Exception as raised:
            error = raised
    value, error = broadcast_object((value, error))
    if error is not None:
        raise error
    return value


def all_or_raise(function: Callable[[], T], errors: tuple[type[Exception], ...]) -> T:
    """This rank's result of `function`; one of `errors` that it raises on one rank is raised on every rank.

    A collective call; `function` is none.
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
    """Whether no other rank has asked this before: an error is printed once, whichever rank meets it."""
    if world_size() == 1:
        return True
    try:
        return dist.distributed_c10d._get_default_store().add("smopd/failed", 1) == 1
    except RuntimeError:  # the store went with the rank that held it, which has printed its own
        return False


def broadcast_object(value: Any) -> Any:
    """Rank 0's object on every rank."""
    box = [value]
    if world_size() > 1:
        dist.broadcast_object_list(box, src=0)
    return box[0]
