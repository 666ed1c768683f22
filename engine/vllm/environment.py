"""Environment variables for a vLLM engine, and the process state that creating one changes."""

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
from smopd.engine.settings import Vllm

LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def engine_environment(settings: Vllm) -> dict[str, str | None]:
    """Return variables to set while an engine is created; None unsets one."""
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
    import torch._dynamo  # reads the environment on import, so before it changes

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
