"""Trackers: MLflow, SwanLab, TensorBoard, Trackio, and Weights & Biases."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

SWANLAB_ID = 21
"""Length of a SwanLab id."""


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

        kept = _kept_id(folder / "wandb_id")
        own = {"id": kept, "resume": "allow", "dir": str(folder), "config": settings}
        self.run = wandb.init(project=project, name=run, **own)
        self.run.define_metric("*", step_metric="step")  # a resumed run may log a step again

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log({"step": step, **values})

    def close(self) -> None:
        self.run.finish()


class _Mlflow:
    """Logs to MLFLOW_TRACKING_URI, or to the folder that MLflow chooses."""

    def __init__(self, folder: Path, project: str, run: str, settings: dict[str, Any], start: int):
        import mlflow

        self.mlflow, kept = mlflow, folder / "mlflow_id"  # MLflow makes the id
        mlflow.set_experiment(project)
        own = mlflow.start_run(run_id=kept.read_text() if kept.exists() else None, run_name=run)
        kept.write_text(own.info.run_id)
        mlflow.log_dict(settings, "settings.json")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        self.mlflow.end_run()


class _SwanLab:
    def __init__(self, folder: Path, project: str, run: str, settings: dict[str, Any], start: int):
        import swanlab

        self.swanlab, kept = swanlab, _kept_id(folder / "swanlab_id")
        own = {"id": kept[:SWANLAB_ID], "resume": "allow", "logdir": str(folder / "swanlab")}
        swanlab.init(project=project, experiment_name=run, config=settings, **own)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.swanlab.log(dict(values), step=step)

    def close(self) -> None:
        self.swanlab.finish()


def _kept_id(file: Path) -> str:
    """Return the id of a run, which it keeps if it resumes."""
    if not file.exists():
        file.write_text(uuid.uuid4().hex)
    return file.read_text()


TRACKERS: dict[str, OpensTracker] = {
    "mlflow": _Mlflow,
    "swanlab": _SwanLab,
    "tensorboard": _TensorBoard,
    "trackio": _Trackio,
    "wandb": _Wandb,
}
