"""A run's metrics for TensorBoard, Trackio or Weights & Biases, beside metrics.jsonl; none by default."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from smopd.engine.imports import resolve


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


def open_tracker(
    name: str, folder: Path, project: str, run: str, settings: dict[str, Any], start: int
) -> Tracker:
    """The tracker of this name or import path.

    Args:
        folder: the run's; TensorBoard and wandb write below it.
        project, run: the recipe's and the run's names.
        settings: resolved, as plain values.
        start: steps that are done; a resumed run goes on where its checkpoint was.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return resolve(name, TRACKERS)(folder, project, run, settings, start)


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

        self.run = wandb.init(
            project=project,
            name=run,
            id=_lasting_id(folder),
            resume="allow",
            dir=str(folder),
            config=settings,
        )
        self.run.define_metric("*", step_metric="step")  # a resumed run may log a step again

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log({"step": step, **values})

    def close(self) -> None:
        self.run.finish()


TRACKERS: dict[str, OpensTracker] = {"tensorboard": _TensorBoard, "trackio": _Trackio, "wandb": _Wandb}


def _lasting_id(folder: Path) -> str:
    """The same for a run that goes on in its folder."""
    file = folder / "wandb_id"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(uuid.uuid4().hex)
    return file.read_text()
