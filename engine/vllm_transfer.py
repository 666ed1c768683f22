"""Weights into an engine that runs in its own process, through files in shared memory.

vLLM imports this module in its workers, where it registers a weight-transfer engine. The sender writes a few
decoder layers to a file, so that neither side holds a second copy of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from vllm import LLM
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

BACKEND = "smopd_files"
EXTENSION = "smopd.engine.vllm_transfer.Extension"
FILE_BYTES = 256 << 20  # ours: a file is closed after the decoder layer that passes it
SHARED_MEMORY = Path("/dev/shm")


class Extension:
    """Named as a worker's extension so that the worker imports this module."""

    _weight_update_active: bool

    def forget_weight_update(self) -> None:
        """Lets a new update begin where one was begun and never ended: its sender died."""
        self._weight_update_active = False


@dataclass
class NoInfo(WeightTransferInitInfo):
    """Files need no meeting point."""


@dataclass
class FileInfo(WeightTransferUpdateInfo):
    path: str


class FileEngine(WeightTransferEngine[NoInfo, FileInfo]):
    """The worker's side."""

    init_info_cls = NoInfo
    update_info_cls = FileInfo

    def init_transfer_engine(self, init_info: NoInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():  # of an update that failed: its tensors would be loaded before the new ones
                info.loaded_weights.clear()
                info.load_numel = 0
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FileInfo) -> None:
        self.model.load_weights(stored(update_info.path))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        pass


def send(llm: LLM, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Streams full tensors by their checkpoint names into `llm`."""
    place = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    with TemporaryDirectory(prefix="smopd-weights-", dir=place) as folder:
        path = Path(folder) / "part.safetensors"
        llm.start_weight_update()
        for part in parts(weights, FILE_BYTES):
            save_file({name: on_cpu(value) for name, value in part.items()}, path)
            del part
            llm.update_weights({"update_info": {"path": str(path)}})
            path.unlink()
        llm.finish_weight_update()


def parts(weights: Iterable[tuple[str, Tensor]], file_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Consecutive tensors of `file_bytes` or more together; a decoder layer's are never parted."""
    part: dict[str, Tensor] = {}
    size = 0
    for _, layer in groupby(weights, key=lambda item: layer_of(item[0])):
        for name, value in layer:
            part[name] = value
            size += value.numel() * value.element_size()
        if size >= file_bytes:
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


def stored(path: str | Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one safetensors file, one at a time."""
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  no mapping
            yield name, file.get_tensor(name)


WeightTransferEngineFactory.register_engine(BACKEND, FileEngine)
