"""`smopd export RUN --output FOLDER`: write a checkpoint of a run as a model folder, with a model card.

RUN is the folder of a run, such as runs/quickstart/smopd. The default is the newest checkpoint. `--step N`
selects another, and `--best greedy/sum` the kept checkpoint with the highest value of this metric.
"""

import os
import sys
from pathlib import Path
from typing import Annotated

from smopd import extra  # noqa: F401 reports missing packages

# isort: split
import tyro

from smopd.names import nearest
from smopd.record.files import JsonlLog
from smopd.run.failures import one_line


def main(argv: list[str] | None = None) -> int:
    with one_line("smopd export"):
        tyro.cli(export_checkpoint, args=argv, prog="smopd export", description=__doc__)
    return 0


def export_checkpoint(
    run: Annotated[Path, tyro.conf.Positional], output: Path, step: int | None = None, best: str | None = None
) -> None:
    """Write the model folder.

    Args:
        run: Folder of the run.
        output: A new folder.
        step: Checkpoint to export. Default: the newest.
        best: Export the kept checkpoint with the highest value of this metric of metrics.jsonl.
    """
    from smopd.engine import distributed
    from smopd.engine.models.loading import allow_custom_code, load_tokenizer, stored_dtype
    from smopd.engine.student.checkpoint import Checkpoints, export, require_whole, saved_steps
    from smopd.report.summary import write_card
    from smopd.run import build
    from smopd.run.base import model_path
    from smopd.run.folder import input_changes, known_inputs, saved_settings
    from smopd.run.identity import named_model

    run = Path(os.path.abspath(run))  # keeps a link: its own parent is the recipe's folder
    folder, name = run.parent, run.name
    if output.exists():
        raise ValueError(f"--output: {output} exists, expected a new folder")
    if not (folder / "config.yaml").exists():
        raise ValueError(f"{run} is not a run, expected the folder of one in a run directory")
    if best is not None and step is not None:
        raise ValueError(f"--step: got {step} and --best {best}, expected one of them")
    settings = saved_settings(folder)
    if name not in settings.runs:
        hint = nearest(name, settings.runs)
        raise ValueError(f"{run} is not a run{hint}; there are {[*settings.runs]}")
    kept = saved_steps(run / "checkpoints")
    if best is not None:
        step = best_step(run, best, kept)
    elif step is None and kept:
        step = kept[-1]
    if step not in kept:
        raise ValueError(f"--step: got {step}, expected a kept checkpoint of {run}: {kept}")
    allow_custom_code(settings.model.trust_remote_code)
    own = settings.resolved(name)
    start = folder / name / "start"
    path = str(start) if start.exists() else model_path(settings, folder, own.runs[name].init)
    require_whole(Path(path))
    now = named_model(str(settings.model.path))
    before = known_inputs(folder) if now else {}
    if changed := input_changes(folder, settings, before, {"model.path": now}):
        raise ValueError(f"{changed[0]}; a checkpoint belongs to the model that its run began with")
    with distributed.process_group() as device:
        student = build.student(own, path, device)
        Checkpoints(run / "checkpoints", own.checkpoint.keep).restore(student, step)
        export(student, load_tokenizer(path), output, stored_dtype(path))
    write_card(settings, folder, name, output, step)
    print(f"wrote step {step} to {output}")


def best_step(run: Path, metric: str, kept: list[int]) -> int:
    """Return the step of the kept checkpoint with the highest value of the metric."""
    lines = [line for line in JsonlLog(run / "metrics.jsonl").read() if line["step"] in kept]
    values = {line["step"]: line[metric] for line in lines if line.get(metric) is not None}
    if not values:
        names = sorted({name for line in lines for name in line})
        what = f"no kept checkpoint has the metric {metric!r}{nearest(metric, names)}"
        raise ValueError(f"--best: {what}; metrics of evaluations need evaluation.every")
    return max(values, key=lambda step: (values[step], step))


if __name__ == "__main__":
    sys.exit(main())
