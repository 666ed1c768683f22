"""Trackers: MLflow, SwanLab, TensorBoard, Trackio, and Weights & Biases."""

import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

SWANLAB_ID = 21  # length of a SwanLab id


class Tracker(Protocol):
    """Receives the metrics of a run, on rank 0."""

    def log(self, step: int, values: Mapping[str, float], /) -> object:
        """Log the finite metrics of `step`, counted from 1."""

    def close(self) -> object:
        """Close the tracker after the run has ended or failed."""


OpensTracker = Callable[[Path, str, str, "dict[str, Any]", int], Tracker]
"""(run folder, recipe name, run name, resolved settings, steps done before) -> Tracker."""


class _Opened(NamedTuple):
    log: Callable[[int, Mapping[str, float]], object]
    close: Callable[[], object]


def _tensorboard(folder: Path, project: str, run: str, settings: dict[str, Any], start: int) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=start + 1)

    def log(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return _Opened(log, writer.close)


def _trackio(folder: Path, project: str, run: str, settings: dict[str, Any], start: int) -> Tracker:
    import trackio

    trackio.init(project=project, name=run, config=settings, resume="allow", embed=False)
    return _Opened(lambda step, values: trackio.log(dict(values), step=step), trackio.finish)


def _wandb(folder: Path, project: str, run: str, settings: dict[str, Any], start: int) -> Tracker:
    import wandb

    own = {"id": _kept_id(folder / "wandb_id"), "resume": "allow", "dir": str(folder), "config": settings}
    opened = wandb.init(project=project, name=run, **own)
    opened.define_metric("*", step_metric="step")  # a resumed run may log a step again
    return _Opened(lambda step, values: opened.log({"step": step, **values}), opened.finish)


def _mlflow(folder: Path, project: str, run: str, settings: dict[str, Any], start: int) -> Tracker:
    """Log to MLFLOW_TRACKING_URI, or to the folder that MLflow chooses."""
    import mlflow

    kept = folder / "mlflow_id"  # MLflow makes the id
    mlflow.set_experiment(project)
    own = mlflow.start_run(run_id=kept.read_text() if kept.exists() else None, run_name=run)
    kept.write_text(own.info.run_id)
    mlflow.log_dict(settings, "settings.json")
    return _Opened(lambda step, values: mlflow.log_metrics(dict(values), step=step), mlflow.end_run)


def _swanlab(folder: Path, project: str, run: str, settings: dict[str, Any], start: int) -> Tracker:
    import swanlab

    own = {"id": _kept_id(folder / "swanlab_id")[:SWANLAB_ID], "logdir": str(folder / "swanlab")}
    swanlab.init(project=project, experiment_name=run, config=settings, resume="allow", **own)
    return _Opened(lambda step, values: swanlab.log(dict(values), step=step), swanlab.finish)


def _kept_id(file: Path) -> str:
    """Return the run's id from `file`, so that a resumed run keeps its id. Create it if needed."""
    if not file.exists():
        file.write_text(uuid.uuid4().hex)
    return file.read_text()


TRACKERS: dict[str, OpensTracker] = {
    "mlflow": _mlflow,
    "swanlab": _swanlab,
    "tensorboard": _tensorboard,
    "trackio": _trackio,
    "wandb": _wandb,
}
