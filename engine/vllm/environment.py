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
from smopd.engine.settings import VllmSettings

LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def engine_environment(settings: VllmSettings) -> dict[str, str | None]:
    """The environment while an engine is created; None removes a variable."""
    alone = settings.placement == "process"
    values: dict[str, str | None] = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if alone else "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
    }
    defaults = {
        "VLLM_CONFIGURE_LOGGING": "1" if alone else "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    values.update({name: os.environ.get(name, value) for name, value in defaults.items()})
    if not torch.cuda.is_available():
        values["TORCHDYNAMO_DISABLE"] = "1"  # else helpers compile for ten seconds at the first call
    local_rank = os.environ.get("LOCAL_RANK", "0")
    if alone:
        from smopd.engine.process import CALLER

        values.update({**dict.fromkeys(LAUNCHER), CALLER: str(os.getpid())})
        if settings.transfer == "ipc":
            values["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # handles come pickled, from this process alone
        if torch.cuda.is_available():
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            count = torch.cuda.device_count()
            devices = visible.split(",") if visible else [str(i) for i in range(count)]
            if settings.tensor_parallel_size == 1:
                values["CUDA_VISIBLE_DEVICES"] = devices[int(local_rank) % len(devices)]
    elif dist.is_initialized():
        values.update({"RANK": str(distributed.rank()), "LOCAL_RANK": local_rank})
    return values


@contextmanager
def restoring_process_state(environment: dict[str, str | None] | None = None) -> Iterator[None]:
    """Restores what vLLM changes in the process: random states, environment, threads, logging."""
    import torch._dynamo  # before the environment changes, whose variables it reads on import

    old_environment = dict(os.environ)
    old_random = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda_random = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    matmul_precision = torch.get_float32_matmul_precision()
    record_factory = logging.getLogRecordFactory()
    theirs = logging.getLogger("vllm")
    old_logging = theirs.level, theirs.handlers[:], theirs.propagate
    for name, value in (environment or {}).items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    try:
        if environment and theirs.level == logging.NOTSET:
            theirs.setLevel(environment["VLLM_LOGGING_LEVEL"] or logging.ERROR)
            old_logging = theirs.level, *old_logging[1:]
        yield
    finally:
        os.environ.clear()
        os.environ.update(old_environment)
        random.setstate(old_random[0])
        np.random.set_state(old_random[1])
        torch.set_rng_state(old_random[2])
        if cuda_random is not None:
            torch.cuda.set_rng_state_all(cuda_random)
        torch.set_num_threads = set_num_threads
        set_num_threads(num_threads)
        torch.set_float32_matmul_precision(matmul_precision)
        logging.setLogRecordFactory(record_factory)
        theirs.level, theirs.handlers, theirs.propagate = old_logging
        gc.unfreeze()  # vLLM freezes the caller's objects too, which would never be collected
