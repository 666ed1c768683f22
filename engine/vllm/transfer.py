"""The receiving end of `engine.weights.transport` in vLLM.

vLLM's workers import this module, which registers a weight-transfer engine. A process with such an
engine ends soon after the process that uses vLLM has ended.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

from safetensors import safe_open
from safetensors.torch import load
from vllm.distributed.weight_transfer import base
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from smopd.engine.process import end_with_caller

BACKEND = "smopd"
EXTENSION = "smopd.engine.vllm.transfer.Extension"


class Extension:
    """A worker extension. To load it, vLLM's workers import this module."""

    _weight_update_active: bool

    def forget_weight_update(self) -> None:
        """Allow a new update if the last one is unfinished because its sender died."""
        self._weight_update_active = False


@dataclass
class PartInfo(base.WeightTransferUpdateInfo):
    """A safetensors file, or its content in base64."""

    path: str | None = None
    content: str | None = None


class PartEngine(base.WeightTransferEngine[base.WeightTransferInitInfo, PartInfo]):
    init_info_cls = base.WeightTransferInitInfo  # empty: nothing has to be set up
    update_info_cls = PartInfo

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        end_with_caller()

    def init_transfer_engine(self, init_info: base.WeightTransferInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():  # drops the tensors of an update that failed
                info.loaded_weights.clear()
                info.load_numel = 0
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: PartInfo) -> None:
        if update_info.content is not None:
            self.model.load_weights(load(base64.b64decode(update_info.content)).items())
            return
        with safe_open(update_info.path, framework="pt") as file:
            self.model.load_weights((name, file.get_tensor(name)) for name in list(file.keys()))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        pass


WeightTransferEngineFactory.register_engine(BACKEND, PartEngine)
