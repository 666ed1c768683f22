"""What is kept of a finished job: its numbers, one small file a job, so that the page outlives the runs.

The runs themselves (weights, responses, checkpoints) are large. A kept file has what most tables and verdicts
read: held-out results, the settings that are not the defaults, what a guard chose, time, commit and versions.
What is drawn step by step is not in it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from bench.study.jobs import Job
from bench.study.measures import environment, evaluation, means
from smopd.config.cli import read_settings
from smopd.config.schedule import BASE
from smopd.engine.files import write_atomically

MEAN = "/zero_variance_groups"
"""The training metrics whose names end so are kept as their mean over the steps."""
MARK = "kept.json"  # in a folder that was made from a kept file


def keep(job: Job, results: Path) -> Path:
    """Writes the file of a finished job.

    Raises:
        FileNotFoundError: a run of the job has no held-out results.
    """
    settings = read_settings(str(job.folder / "config.yaml"))
    there = environment(job.folder)
    text = {
        "seconds": float(job.seconds.read_text()),
        "environment": {key: there.get(key) for key in ("git", "python", "packages", "cpus")},
        "settings": settings.model_dump(mode="json", exclude_defaults=True, exclude={"output"}),
        "runs": {run: _numbers(job.folder / run) for run in (BASE, *settings.runs)},
    }
    path = results / _name(job)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(text, indent=1) + "\n").encode())
    return path


def restore(wanted: Sequence[Job], results: Path) -> None:
    """Makes the folders of the jobs that have a file and no folder, as far as the page reads them."""
    for job in wanted:
        path = results / _name(job)
        if job.folder.exists() or not path.exists():
            continue
        kept = json.loads(path.read_text())
        job.folder.mkdir(parents=True)
        for run, numbers in kept["runs"].items():
            (job.folder / run).mkdir()
            (job.folder / run / "evaluation.json").write_text(json.dumps(numbers["evaluation"]))
            (job.folder / run / "metrics.jsonl").write_text(json.dumps({"step": 0} | numbers["means"]) + "\n")
            (job.folder / run / "done.json").write_text("{}")
        (job.folder / "config.yaml").write_text(yaml.safe_dump(kept["settings"], sort_keys=False))
        (job.folder / "environment.json").write_text(json.dumps(kept["environment"]))
        (job.folder / MARK).write_text(json.dumps(str(path)))
        job.seconds.write_text(f"{kept['seconds']}\n")


def forget(job: Job) -> None:
    """Takes a restored folder away: it has no weights for further runs to start from."""
    if (job.folder / MARK).exists():
        shutil.rmtree(job.folder)


def _name(job: Job) -> str:
    size = "" if job.size == "cpu" else f"{job.size}_"
    return f"{size}{job.experiment}_{job.variant}_seed_{job.seed}.json"


def _numbers(run: Path) -> dict[str, Any]:
    if not (found := evaluation(run)):
        raise FileNotFoundError(f"{run} has no evaluation.json: is the job finished?")
    merged = run / "merge.json"
    chosen = {"chosen": json.loads(merged.read_text())["chosen"]} if merged.exists() else {}
    return {"evaluation": found, "means": means(run, MEAN)} | chosen
