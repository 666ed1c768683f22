"""Weights to an engine in another process, by whatever reaches it (`engine.settings.WeightTransport`).

files   safetensors files that the engine reads under the same path
inline  safetensors in the requests themselves, for servers that share no folder with the trainer
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch
from safetensors.torch import save, save_file
from torch import Tensor

from smopd.engine.settings import WeightTransport

PART_BYTES = 256 << 20  # ours: a part ends after the decoder layer that passes it
SHARED_MEMORY = Path("/dev/shm")


class WeightReceiver(Protocol):
    """What takes an update; vLLM's `LLM` is one."""

    def start_weight_update(self) -> None: ...

    def update_weights(self, request: dict[str, Any]) -> None:
        """`update_info` in it holds one part, which is read when this returns."""
        ...

    def finish_weight_update(self) -> None: ...


def send(
    receiver: WeightReceiver,
    weights: Iterable[tuple[str, Tensor]],
    transport: WeightTransport,
    folder: str | Path | None = None,
) -> None:
    """Full tensors by their transformers names; neither side holds a second copy of the model.

    Args:
        folder: for files: one that the engine sees too; None: shared memory of this host.
    """
    if folder is None and SHARED_MEMORY.is_dir():
        folder = SHARED_MEMORY
    receiver.start_weight_update()
    with TemporaryDirectory(prefix="smopd-weights-", dir=folder) as own:
        Path(own).chmod(0o755)
        path = Path(own) / "part.safetensors"
        for part in parts(weights):
            held = {name: on_cpu(value) for name, value in part.items()}
            if transport == "files":
                save_file(held, path)
                update_info = {"path": str(path)}
            else:
                update_info = {"content": base64.b64encode(save(held)).decode()}
            del held
            receiver.update_weights({"update_info": update_info})
            path.unlink(missing_ok=True)
    receiver.finish_weight_update()


def parts(weights: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Consecutive tensors of PART_BYTES or more together; a decoder layer is never split."""
    part: dict[str, Tensor] = {}
    size = 0
    for _, layer in groupby(weights, key=lambda item: _layer_of(item[0])):
        for name, value in layer:
            part[name] = value
            size += value.numel() * value.element_size()
        if size >= PART_BYTES:
            yield part
            part, size = {}, 0
    if part:
        yield part


def on_cpu(value: Tensor) -> Tensor:
    """A contiguous copy that shares no memory, as safetensors asks: a tied head comes twice."""
    return torch.empty(value.shape, dtype=value.dtype).copy_(value.detach())


def _layer_of(name: str) -> str:
    """`name` up to its first number, or the whole of it."""
    pieces = name.split(".")
    for i, piece in enumerate(pieces):
        if piece.isdigit():
            return ".".join(pieces[: i + 1])
    return name
