"""Weights as a few safetensors files, one at a time: how they reach an engine in another process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file
from torch import Tensor

PART_BYTES = 256 << 20  # ours: a part ends behind the decoder layer that passes it
SHARED_MEMORY = Path("/dev/shm")


def part_files(weights: Iterable[tuple[str, Tensor]], place: str | Path | None = None) -> Iterator[Path]:
    """Files with the tensors in order, each gone when the next is asked for.

    Neither side holds a second copy of the model: a file has a few decoder layers.

    Args:
        place: a folder that the readers see too; None: shared memory of this host.
    """
    place = place or (SHARED_MEMORY if SHARED_MEMORY.is_dir() else None)
    with TemporaryDirectory(prefix="smopd-weights-", dir=place) as folder:
        Path(folder).chmod(0o755)
        path = Path(folder) / "part.safetensors"
        for part in parts(weights):
            save_file({name: on_cpu(value) for name, value in part.items()}, path)
            del part
            yield path
            path.unlink()


def parts(weights: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Consecutive tensors of PART_BYTES or more together; a decoder layer's are never parted."""
    part: dict[str, Tensor] = {}
    size = 0
    for _, layer in groupby(weights, key=lambda item: layer_of(item[0])):
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


def layer_of(name: str) -> str:
    """What stands before and with the first number in `name`, or the whole name."""
    pieces = name.split(".")
    for i, piece in enumerate(pieces):
        if piece.isdigit():
            return ".".join(pieces[: i + 1])
    return name
