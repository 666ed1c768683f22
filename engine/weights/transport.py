"""Publish the student's weights, and send weights to another process (`settings.WeightTransport`).

files   safetensors files that the engine reads under the same path
inline  safetensors inside the requests, for servers that share no folder with the trainer
"""

import base64
import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save, save_file
from torch import Tensor

from smopd.engine.errors import CannotSend
from smopd.engine.protocols import RolloutEngine
from smopd.engine.settings import WeightTransport
from smopd.engine.student.student import Student

PART_BYTES = 256 << 20  # ours: a part ends after the decoder layer that brings it to this size
SHARED_MEMORY = Path("/dev/shm")


def publish_weights(student: Student, rollouts: RolloutEngine, version: int) -> None:
    """Load the student's weights into the rollout engine as policy `version`. This is a collective call."""
    served = rollouts.policy_version
    if version < served or version == served > 0:  # an engine starts at version 0, which may be published
        raise ValueError(f"publish_weights: version {version}, expected one above {served}")
    rollouts.load_weights(student.weights(), version)


class WeightReceiver(Protocol):
    """Receiver of a weight update, such as vLLM's `LLM`."""

    def start_weight_update(self) -> None: ...

    def update_weights(self, request: dict[str, Any]) -> None:
        """Load the part in `request["update_info"]`."""
        ...

    def finish_weight_update(self) -> None: ...


def send(
    receiver: WeightReceiver,
    weights: Iterable[tuple[str, Tensor]],
    transport: WeightTransport,
    folder: str | Path | None = None,
) -> None:
    """Send full tensors in parts, inline or by files in `folder` (by default this host's shared memory)."""
    if folder is None and SHARED_MEMORY.is_dir():
        folder = SHARED_MEMORY
    receiver.start_weight_update()
    with TemporaryDirectory(prefix="smopd-weights-", dir=folder) as own:
        Path(own).chmod(0o755)
        path = Path(own) / "part.safetensors"
        for part in parts(weights):
            held = {name: on_cpu(value) for name, value in part.items()}
            if transport == "files":
                try:
                    save_file(held, path)
                except (OSError, SafetensorError) as error:
                    why = f"weights for an engine cannot be written ({error})"
                    raise CannotSend(f"{path}: {why}; make room and rerun to resume") from error
                update_info = {"path": str(path)}
            else:
                update_info = {"content": base64.b64encode(save(held)).decode()}
            del held
            receiver.update_weights({"update_info": update_info})
            path.unlink(missing_ok=True)
    receiver.finish_weight_update()


def parts(weights: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Group consecutive tensors into parts of at least PART_BYTES. A decoder layer is never split."""
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
    """Return a contiguous CPU copy in memory of its own, which safetensors requires for a tied head."""
    return torch.empty(value.shape, dtype=value.dtype).copy_(value.detach())


def _layer_of(name: str) -> str:
    """Return `name` up to its first number, such as "model.layers.3"."""
    found = re.match(r".*?\.\d+(?=\.|$)", name)
    return found[0] if found else name
