"""The trained model's weights into the engine that samples, numbered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smopd.engine.protocols import RolloutEngine

if TYPE_CHECKING:
    from smopd.engine.student.student import Student


def publish_weights(student: Student, rollouts: RolloutEngine, version: int) -> None:
    """Serves the student's weights from now on as policy `version`; a collective call.

    They go as full tensors, one at a time, those of a LoRA student merged.

    Raises:
        ValueError: `version` is not above the engine's; or a weight is missing, unknown or of another shape.
    """
    served = rollouts.policy_version
    if version < served or version == served > 0:  # version 0 is what an engine begins with
        raise ValueError(f"publish_weights: version {version}, expected one above {served}")
    rollouts.load_weights(student.weights(), version)
