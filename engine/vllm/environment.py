"""The environment that a vLLM engine reads, and the process state that creating one changes."""

from __future__ import annotations

import gc
import logging
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist

from smopd.engine import distributed
from smopd.engine.process import CALLER
from smopd.engine.settings import VllmSettings

LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def engine_environment(settings: VllmSettings) -> dict[str, str | None]:
    """The environment while an engine is created; None removes a variable."""
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
        values["TORCHDYNAMO_DISABLE"] = "1"  # else helpers compile for ten seconds at the first call
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
    """Restores what vLLM changes in the process: random states, environment, threads, logging."""
    import torch._dynamo  # before the environment changes, whose variables it reads on import

    old_environment = dict(os.environ)
    old_random, old_numpy, old_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    old_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
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
        yield
    finally:
        os.environ.clear()
        os.environ.update(old_environment)
        random.setstate(old_random)
        np.random.set_state(old_numpy)
        torch.set_rng_state(old_torch)
        if old_cuda is not None:
            torch.cuda.set_rng_state_all(old_cuda)
        torch.set_num_threads = set_num_threads
        set_num_threads(num_threads)
        torch.set_float32_matmul_precision(matmul_precision)
        logging.setLogRecordFactory(record_factory)
        theirs.level, theirs.handlers, theirs.propagate = level, handlers, propagate
        gc.unfreeze()  # vLLM freezes the caller's objects too, which would never be collected
