"""Trackers: TensorBoard, Trackio and Weights & Biases."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol


class Tracker(Protocol):
    """Receives the metrics of a run, on rank 0."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the finite metrics of `step`, counted from 1."""
        ...

    def close(self) -> None:
        """Close the tracker after the run has ended or failed."""
        ...


OpensTracker = Callable[[Path, str, str, "dict[str, Any]", int], Tracker]
"""(run folder, recipe name, run name, resolved settings, steps done before) -> Tracker."""


class _TensorBoard:
    def __init__(self, folder: Path, project: str, run: str, settings: dict[str, Any], start: int):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=start + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class _Trackio:
    def __init__(self, folder: Path, project: str, run: str, settings: dict[str, Any], start: int):
        import trackio

        self.trackio = trackio
        trackio.init(project=project, name=run, config=settings, resume="allow", embed=False)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.trackio.log(dict(values), step=step)

    def close(self) -> None:
        self.trackio.finish()


class _Wandb:
    def __init__(self, folder: Path, project: str, run: str, settings: dict[str, Any], start: int):
        import wandb

        kept = folder / "wandb_id"  # a resumed run keeps its id
        if not kept.exists():
            kept.write_text(uuid.uuid4().hex)
        own = {"id": kept.read_text(), "resume": "allow", "dir": str(folder), "config": settings}
        self.run = wandb.init(project=project, name=run, **own)
        self.run.define_metric("*", step_metric="step")  # a resumed run may log a step again

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log({"step": step, **values})

    def close(self) -> None:
        self.run.finish()


TRACKERS: dict[str, OpensTracker] = {"tensorboard": _TensorBoard, "trackio": _Trackio, "wandb": _Wandb}
