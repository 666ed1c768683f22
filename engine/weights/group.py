"""A process group for weights alone, of the trainer and one engine's workers, and what those receive."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

TRAINER = 0
"""Its rank in the group; a server's workers come after it."""
_BLOCKING = threading.Lock()


def join(store: dist.Store, backend: str, rank: int, size: int, join_seconds: float, seconds: float) -> Any:
    """A process group that is no part of torch.distributed's global state.

    NCCL connects at the first tensor and not here, and has no deadline for that.
    """
    if backend == "gloo":
        group = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=join_seconds))
        group.set_timeout(timedelta(seconds=seconds))
        return group
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=seconds)
    with _BLOCKING:  # a lost peer is an error of `wait` and not, as by default, the end of this process
        before = os.environ.get("TORCH_NCCL_BLOCKING_WAIT")
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
        try:
            return dist.ProcessGroupNCCL(store, rank, size, options)
        finally:
            if before is None:
                del os.environ["TORCH_NCCL_BLOCKING_WAIT"]
            else:
                os.environ["TORCH_NCCL_BLOCKING_WAIT"] = before


def received(
    group: Any,
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[Sequence[int]],
    device: torch.device,
) -> Iterator[tuple[str, Tensor]]:
    """What the trainer's `send` gives, one tensor at a time; through `device`, which is a CPU for gloo."""
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        value = torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=device)
        group.broadcast(value, TRAINER).wait()
        yield name, value
