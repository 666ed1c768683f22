"""Weights over a process group of the trainer's first rank and the workers of one server.

For servers that share no folder with the trainer. Each has a group of its own, made for one sync: one that is
lost takes no other with it. gloo works anywhere; NCCL needs CUDA on both sides. Needs no vLLM.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
import torch
import torch.distributed as dist
from torch import Tensor

from smopd.engine.remote.client import Client
from smopd.engine.remote.servers import NOT_AN_ANSWER, ServerUnavailable
from smopd.engine.weights.group import TRAINER, join

T = TypeVar("T")


class WeightGroup:
    """The trainer's end of one server's group; tensors go from where `meet` was told."""

    def __init__(self, group: Any, store: dist.Store, device: torch.device):
        self._group, self._store, self._device = group, store, device

    @classmethod
    def meet(
        cls, client: Client, device: torch.device, join_seconds: float, seconds: float
    ) -> tuple[WeightGroup, httpx.Response]:
        """A group with the server's workers, and the server's answer to having joined it.

        Args:
            device: CUDA: by NCCL from this device; CPU: by gloo.
            join_seconds: until all have joined.
            seconds: of one tensor.
        Raises:
            ServerUnavailable: it did not come about.
        """
        backend = "nccl" if device.type == "cuda" else "gloo"
        try:
            size = 1 + client.get("/get_world_size").raise_for_status().json()["world_size"]
            address = address_towards(client.url)
        except (OSError, httpx.HTTPStatusError, *NOT_AN_ANSWER) as error:
            raise ServerUnavailable(f"{type(error).__name__}: {error}") from error
        wait = timedelta(seconds=join_seconds)
        store = dist.TCPStore(address, 0, size, is_master=True, timeout=wait, wait_for_workers=False)
        info = {"backend": backend, "address": address, "port": store.port, "size": size}
        info |= {"join_seconds": join_seconds, "seconds": seconds}
        group, joined = _both(
            lambda: join(store, backend, TRAINER, size, join_seconds, seconds),
            lambda: client.post("/init_weight_transfer_engine", json={"init_info": info}),
        )
        return cls(group, store, device), joined

    def send(self, client: Client, part: Mapping[str, Tensor]) -> httpx.Response:
        """The server's answer to having loaded `part`, contiguous tensors on this group's device.

        Raises:
            ServerUnavailable: it did not.
        """
        info = {
            "names": list(part),
            "dtypes": [str(value.dtype).removeprefix("torch.") for value in part.values()],
            "shapes": [list(value.shape) for value in part.values()],
        }
        _, answer = _both(
            lambda: self._broadcast(part.values()),
            lambda: client.post("/update_weights", json={"update_info": info}),
        )
        return answer

    def _broadcast(self, values: Iterable[Tensor]) -> None:
        for value in values:
            self._group.broadcast(value, TRAINER).wait()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def address_towards(url: str) -> str:
    """This host's address as the server at `url` sees it."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    with socket.create_connection((parts.hostname or "", port), timeout=10.0) as connection:
        return connection.getsockname()[0]


def _both(ours: Callable[[], T], asks: Callable[[], httpx.Response]) -> tuple[T, httpx.Response]:
    """What `ours` returns, done while the server does what it is asked, and the server's answer.

    Raises:
        ServerUnavailable: either failed; ours is named where both did. Where only the server did, ours is
            left to its timeout.
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
        answer, trouble = asks(), ""
        if not answer.is_success:
            trouble = f"status {answer.status_code}: {answer.text[:200]}"
    except httpx.TransportError as error:
        trouble = f"{type(error).__name__}: {error}"
    if not trouble:
        thread.join()
    if failed:
        raise ServerUnavailable(f"{type(failed[0]).__name__}: {failed[0]}")
    if trouble:
        raise ServerUnavailable(trouble)
    return done[0], answer
