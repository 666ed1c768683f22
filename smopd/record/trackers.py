"""A run's metrics for TensorBoard, Trackio or Weights & Biases, beside metrics.jsonl; none by default."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol


class Tracker(Protocol):
    """What gets the metrics of a run, on rank 0."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """The metrics after `step`, from 1: finite numbers by name."""
        ...

    def close(self) -> None:
        """The run is over, or has failed."""
        ...


OpensTracker = Callable[[Path, str, str, "dict[str, Any]", int], Tracker]
"""(folder of the run, name of the recipe, name of the run, resolved settings, steps done) -> Tracker."""


def missing(names: list[str]) -> list[str]:
    """Those of ours whose package is not installed."""
    return [name for name in names if name in TRACKERS and find_spec(name) is None]


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

        kept = folder / "wandb_id"  # a resumed run has the id that it began with
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
