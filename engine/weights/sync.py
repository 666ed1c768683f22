"""The trained model's weights into the engine that samples, numbered."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from smopd.engine import distributed
from smopd.engine.protocols import AdapterRolloutEngine, RolloutEngine

if TYPE_CHECKING:
    from smopd.engine.student.student import Student


def publish_weights(student: Student, rollouts: RolloutEngine, version: int) -> None:
    """Serves the student's weights from now on as policy `version`; a collective call.

    A LoRA student goes as an adapter where the engine takes adapters, else as full tensors, one at a time.

    Raises:
        ValueError: `version` is not above the engine's; or a weight is missing, unknown or of another shape.
    """
    served = rollouts.policy_version
    if version < served or version == served > 0:  # version 0 is what an engine begins with
        raise ValueError(f"publish_weights: version {version}, expected one above {served}")
    if student.lora is None or not isinstance(rollouts, AdapterRolloutEngine) or not rollouts.takes_adapters:
        rollouts.load_weights(student.weights(), version)
        return
    with tempfile.TemporaryDirectory(prefix="smopd-adapter-") as own:
        folder = Path(own) / "adapter"
        student.adapter(folder)
        here = {file.name: file.read_bytes() for file in folder.glob("*")}
        folder.mkdir(exist_ok=True)
        for name, content in distributed.broadcast_object(here).items():
            (folder / name).write_bytes(content)  # other hosts do not see the first rank's folder
        rollouts.load_adapter(folder, version)
