"""Weights into an engine that runs in its own process: files, a process group, or handles of CUDA memory.

vLLM imports this module in its workers, where it registers two weight-transfer engines. One is made in every
process that holds a model, so it also has that process end with its caller.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.multiprocessing import reductions
from vllm import LLM
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from smopd.engine.process import end_with_caller
from smopd.engine.weights.files import part_files, parts
from smopd.engine.weights.group import TRAINER, join, received

BACKENDS = {"files": "smopd", "ipc": "smopd_ipc"}
"""Ours for each `transfer` of VllmSettings."""
EXTENSION = "smopd.engine.vllm.transfer.Extension"


class Extension:
    """Named as a worker's extension so that the worker imports this module."""

    _weight_update_active: bool

    def forget_weight_update(self) -> None:
        """Lets a new update begin where one was begun and never ended: its sender died."""
        self._weight_update_active = False


@dataclass
class GroupInfo(WeightTransferInitInfo):
    """The group of smopd.engine.remote.weight_group to join; `backend` None: weights come in files."""

    backend: str | None = None
    address: str = ""
    port: int = 0
    size: int = 0
    join_seconds: float = 0.0
    seconds: float = 0.0


@dataclass
class PartInfo(WeightTransferUpdateInfo):
    """A file with the tensors, or what the trainer is about to send through the group."""

    path: str | None = None
    names: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)


class StreamEngine(WeightTransferEngine[GroupInfo, PartInfo]):
    """The worker's side of files and groups."""

    init_info_cls = GroupInfo
    update_info_cls = PartInfo

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._group: Any = None
        end_with_caller()

    def init_transfer_engine(self, init_info: GroupInfo) -> None:
        self.shutdown()
        if init_info.backend is not None:
            wait = timedelta(seconds=init_info.join_seconds)
            store = dist.TCPStore(init_info.address, init_info.port, init_info.size, timeout=wait)
            own = self.parallel_config.data_parallel_index * self.parallel_config.world_size
            rank = TRAINER + 1 + own + self.parallel_config.rank
            waits = (init_info.join_seconds, init_info.seconds)
            self._group = join(store, init_info.backend, rank, init_info.size, *waits)
            self._through = self.device if init_info.backend == "nccl" else torch.device("cpu")

    def start_weight_update(self) -> None:
        begin(self.model)

    def receive_weights(self, update_info: PartInfo) -> None:
        if update_info.path is not None:
            self.model.load_weights(stored(update_info.path))
            return
        if self._group is None:
            raise RuntimeError("receive_weights: no group was joined for tensors (init_transfer_engine)")
        info = (update_info.names, update_info.dtypes, update_info.shapes)
        through = received(self._group, *info, self._through)
        self.model.load_weights((name, value.to(self.device)) for name, value in through)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        self._group = None


class IpcEngine(IPCWeightTransferEngine):
    """vLLM's own for CUDA memory of another process, which can begin again after an update that failed."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        end_with_caller()

    def start_weight_update(self) -> None:
        begin(self.model)


def begin(model: nn.Module) -> None:
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():  # of an update that failed: its tensors would be loaded before the new ones
            info.loaded_weights.clear()
            info.load_numel = 0
    initialize_layerwise_reload(model)


def send(llm: LLM, weights: Iterable[tuple[str, Tensor]], transfer: str) -> None:
    """Streams full tensors by their checkpoint names into `llm`, which was made for this `transfer`."""
    llm.start_weight_update()
    if transfer == "files":
        for path in part_files(weights):
            llm.update_weights({"update_info": {"path": str(path)}})
    else:
        gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        for part in parts(weights):
            held = {name: value.detach().cuda().contiguous() for name, value in part.items()}
            torch.cuda.synchronize()
            llm.update_weights({"update_info": handles(held, gpu)})  # returns when they are read
    llm.finish_weight_update()


def handles(held: Mapping[str, Tensor], gpu: str) -> dict[str, Any]:
    """What vLLM's IPC engine reads tensors by; the caller keeps them alive. Its RPC takes them pickled."""
    shared = [{gpu: reductions.reduce_tensor(value)[1]} for value in held.values()]
    return {
        "names": list(held),
        "dtype_names": [str(value.dtype).removeprefix("torch.") for value in held.values()],
        "shapes": [list(value.shape) for value in held.values()],
        "ipc_handles_pickled": base64.b64encode(pickle.dumps(shared)).decode(),
    }


def stored(path: str | Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one safetensors file, one at a time."""
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  no mapping
            yield name, file.get_tensor(name)


WeightTransferEngineFactory.register_engine(BACKENDS["files"], StreamEngine)
WeightTransferEngineFactory.register_engine(BACKENDS["ipc"], IpcEngine)
