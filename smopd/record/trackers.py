"""A run's metrics for TensorBoard, Trackio or Weights & Biases, beside metrics.jsonl; none by default."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from smopd.config.settings import TrackerName


class Tracker(Protocol):
    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def missing(names: list[TrackerName]) -> list[TrackerName]:
    """Those whose package is not installed."""
    return [name for name in names if find_spec(name) is None]


def open_tracker(
    name: TrackerName, folder: Path, project: str, run: str, settings: dict[str, Any], start: int
) -> Tracker:
    """
    Args:
        folder: the run's; TensorBoard and wandb write below it.
        project, run: the recipe's and the run's names.
        settings: resolved, as plain values.
        start: steps that are done; a resumed run goes on where its checkpoint was.
    """
    if name == "tensorboard":
        return _TensorBoard(folder / "tensorboard", start)
    if name == "trackio":
        return _Trackio(project, run, settings)
    return _Wandb(folder, project, run, settings)


class _TensorBoard:
    def __init__(self, folder: Path, start: int):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder), purge_step=start + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class _Trackio:
    def __init__(self, project: str, run: str, settings: dict[str, Any]):
        import trackio

        self.trackio = trackio
        trackio.init(project=project, name=run, config=settings, resume="allow", embed=False)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.trackio.log(dict(values), step=step)

    def close(self) -> None:
        self.trackio.finish()


class _Wandb:
    def __init__(self, folder: Path, project: str, run: str, settings: dict[str, Any]):
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


def _lasting_id(folder: Path) -> str:
    """The same for a run that goes on in its folder."""
    file = folder / "wandb_id"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(uuid.uuid4().hex)
    return file.read_text()
