"""Weights over a process group of the trainer's first rank and the workers of one server.

For servers that share no folder with the trainer. Each has a group of its own, made for one sync: one that is
lost takes no other with it. gloo works anywhere; NCCL needs CUDA on both sides. Needs no vLLM.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
import torch
import torch.distributed as dist
from torch import Tensor

from smopd.engine.servers import Away

T = TypeVar("T")
TRAINER = 0
"""Its rank in the group; a server's workers come after it."""
_BLOCKING = threading.Lock()


class WeightGroup:
    """The trainer's end of one server's group.

    Args:
        client: of the server, whose `/init_weight_transfer_engine` is asked to join.
        backend: `gloo` or `nccl`.
        seconds: that joining, or one tensor, may take.
    Raises:
        Away: the group did not come about.
    """

    def __init__(self, client: httpx.Client, backend: str, seconds: float):
        self.device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None
        try:
            size = 1 + client.get("/get_world_size").raise_for_status().json()["world_size"]
            address = address_towards(str(client.base_url))
        except (OSError, httpx.HTTPStatusError) as error:
            raise Away(f"{type(error).__name__}: {error}") from error
        wait = timedelta(seconds=seconds)
        self.store = dist.TCPStore(address, 0, size, is_master=True, timeout=wait, wait_for_workers=False)
        info = {
            "backend": backend,
            "address": address,
            "port": self.store.port,
            "size": size,
            "seconds": seconds,
        }
        self.group, self.joined = _both(
            lambda: join(self.store, backend, TRAINER, size, seconds),
            lambda: client.post("/init_weight_transfer_engine", json={"init_info": info}),
        )

    def send(self, client: httpx.Client, part: Mapping[str, Tensor]) -> httpx.Response:
        """The server's answer to having loaded `part`.

        Raises:
            Away: it did not.
        """
        values = {name: self._ready(value) for name, value in part.items()}
        info = {
            "names": list(values),
            "dtypes": [str(value.dtype).removeprefix("torch.") for value in values.values()],
            "shapes": [list(value.shape) for value in values.values()],
        }
        _, answer = _both(
            lambda: self._broadcast(values.values()),
            lambda: client.post("/update_weights", json={"update_info": info}),
        )
        return answer

    def _ready(self, value: Tensor) -> Tensor:
        return value.detach().to(self.device or "cpu").contiguous()

    def _broadcast(self, values: Iterable[Tensor]) -> None:
        for value in values:
            self.group.broadcast(value, TRAINER).wait()
        if self.device is not None:
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Ends what still waits in it."""
        with suppress(RuntimeError):
            self.group.abort()


def join(store: dist.Store, backend: str, rank: int, size: int, seconds: float) -> Any:
    """A process group that is no part of torch.distributed's global state."""
    wait = timedelta(seconds=seconds)
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, size, wait)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = wait
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
    """What the trainer's `send` gives, one tensor at a time, on `device`; gloo receives on the CPU."""
    through = device if device.type == "cuda" and "nccl" in group.name().lower() else torch.device("cpu")
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        value = torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=through)
        group.broadcast(value, TRAINER).wait()
        yield name, value.to(device)


def address_towards(url: str) -> str:
    """This host's address as the server at `url` sees it."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    with socket.create_connection((parts.hostname or "", port), timeout=10.0) as connection:
        return connection.getsockname()[0]


def _both(ours: Callable[[], T], asks: Callable[[], httpx.Response]) -> tuple[T, httpx.Response]:
    """What `ours` returns, done while the server does what it is asked, and the server's answer.

    Raises:
        Away: either failed. Where the server did, ours is left to its timeout.
    """
    done: list[T] = []
    failed: list[Exception] = []

    def work() -> None:
        try:
            done.append(ours())
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=work, name="weight-group", daemon=True)
    thread.start()
    try:
        answer = asks()
    except httpx.TransportError as error:
        raise Away(f"{type(error).__name__}: {error}") from error
    if not answer.is_success:
        raise Away(f"status {answer.status_code}: {answer.text[:200]}")
    thread.join()
    if failed:
        raise Away(f"{type(failed[0]).__name__}: {failed[0]}")
    return done[0], answer
