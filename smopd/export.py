"""`smopd export RUN --output FOLDER`: write a checkpoint of a run as a model folder, with a model card.

RUN is the folder of a run, such as runs/quickstart/smopd. The model is that of the newest checkpoint, of
`--step N`, or of the kept checkpoint with the best value of a metric (`--best greedy/sum`).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from smopd import extra  # noqa: F401 reports missing packages

# isort: split
import tyro

from smopd.engine.files import read_json
from smopd.names import nearest
from smopd.record.files import JsonlLog
from smopd.record.progress import say_error
from smopd.run.failures import MISTAKES


@dataclass(frozen=True)
class Options:
    run: Annotated[Path, tyro.conf.Positional]
    """Folder of the run."""
    output: Path
    """A new folder."""
    step: int | None = None
    """Checkpoint to export. Default: the newest."""
    best: str | None = None
    """Export the kept checkpoint with the highest value of this metric of metrics.jsonl."""


def main(argv: list[str] | None = None) -> int:
    options = tyro.cli(Options, args=argv, prog="smopd export", description=__doc__)
    try:
        step = export_checkpoint(options)
    except MISTAKES as error:
        say_error(f"smopd export: {error}")
        return 2
    print(f"wrote step {step} to {options.output}")
    return 0


def export_checkpoint(options: Options) -> int:
    """Write the model folder, and return the step of the checkpoint."""
    from smopd.engine import distributed
    from smopd.engine.models.loading import load_tokenizer, stored_dtype
    from smopd.engine.student.checkpoint import Checkpoints, export, require_whole, saved_steps
    from smopd.report.summary import write_card
    from smopd.run import build
    from smopd.run.base import model_path
    from smopd.run.folder import input_changes, saved_settings
    from smopd.run.identity import named_model

    folder, name = options.run.resolve().parent, options.run.resolve().name
    if options.output.exists():
        raise ValueError(f"--output: {options.output} exists, expected a new folder")
    if not (folder / "config.yaml").exists():
        raise ValueError(f"{options.run} is no run, expected the folder of one in a run directory")
    if options.best is not None and options.step is not None:
        raise ValueError(f"--step: got {options.step} and --best {options.best}, expected one of them")
    settings = saved_settings(folder)
    if name not in settings.runs:
        hint = nearest(name, settings.runs)
        raise ValueError(f"{options.run} is no run{hint}; there are {[*settings.runs]}")
    kept = saved_steps(options.run / "checkpoints")
    step = options.step
    if options.best is not None:
        step = best_step(options.run, options.best, kept)
    elif step is None and kept:
        step = kept[-1]
    if step not in kept:
        raise ValueError(f"--step: got {step}, expected a kept checkpoint of {options.run}: {kept}")
    own = settings.resolved(name)
    start = folder / name / "start"
    path = str(start) if start.exists() else model_path(settings, folder, own.runs[name].init)
    require_whole(Path(path))
    inputs, now = folder / "inputs.json", named_model(str(settings.model.path))
    before = read_json(inputs) if now and inputs.exists() else {}
    if changed := input_changes(folder, settings, before, {"model.path": now}):
        raise ValueError(f"{changed[0]}; a checkpoint belongs to the model that its run began with")
    with distributed.process_group() as device:
        student = build.student(own, path, device)
        Checkpoints(options.run / "checkpoints", own.checkpoint.keep).restore(student, step)
        export(student, load_tokenizer(path), options.output, stored_dtype(path))
    write_card(settings, folder, name, options.output, step)
    return step


def best_step(run: Path, metric: str, kept: list[int]) -> int:
    """Return the kept checkpoint's step with the highest value of the metric."""
    lines = [line for line in JsonlLog(run / "metrics.jsonl").read() if line["step"] in kept]
    values = {line["step"]: line[metric] for line in lines if line.get(metric) is not None}
    if not values:
        names = sorted({name for line in lines for name in line})
        raise ValueError(f"--best: no kept checkpoint has the metric {metric!r}{nearest(metric, names)}")
    return max(values, key=lambda step: (values[step], step))


if __name__ == "__main__":
    sys.exit(main())
