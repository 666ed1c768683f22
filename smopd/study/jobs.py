"""The study's runs, each a `python -m smopd.train`, several at a time; finished ones are not run again."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from smopd.files import write_atomically
from smopd.study.experiments import EXPERIMENTS, SIZES


@dataclass(frozen=True)
class Job:
    """One recipe with one variant's settings and one seed."""

    experiment: str
    variant: str
    seed: int
    output: Path
    size: str

    @property
    def folder(self) -> Path:
        return self.output / self.experiment / self.variant / f"seed_{self.seed}"

    @property
    def finished(self) -> bool:
        return (self.folder / "study_seconds.txt").exists()

    def command(self) -> list[str]:
        experiment = EXPERIMENTS[self.experiment]
        settings = [*experiment.variants[self.variant], *SIZES[self.size]]
        where = ["--seed", str(self.seed), "--output", str(self.folder), "--log.plain", "true"]
        return [sys.executable, "-m", "smopd.train", str(experiment.path), *where, *settings]


def jobs(experiments: Sequence[str], seeds: Sequence[int], output: Path, size: str) -> list[Job]:
    """Seed by seed, so that an interrupted study has whole seeds."""
    return [
        Job(name, variant, seed, output, size)
        for seed in seeds
        for name in experiments
        for variant in EXPERIMENTS[name].variants
    ]


def run(wanted: Sequence[Job], at_once: int) -> list[Job]:
    """Runs the unfinished jobs; what a job prints goes to `study.log` in its folder.

    Returns:
        The jobs that failed.
    """
    due = [job for job in wanted if not job.finished]
    with ThreadPoolExecutor(at_once) as pool:
        succeeded = pool.map(_run, due)
        return [job for job, well in zip(due, succeeded, strict=True) if not well]


def _run(job: Job) -> bool:
    job.folder.mkdir(parents=True, exist_ok=True)
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    started = time.monotonic()
    with (job.folder / "study.log").open("ab") as log:
        done = subprocess.run(job.command(), stdout=log, stderr=log, env=os.environ | threads, check=False)
    seconds = time.monotonic() - started
    name = f"{job.experiment}/{job.variant}/seed_{job.seed}"
    if done.returncode:
        print(f"{name}: failed with {done.returncode}, see {job.folder / 'study.log'}", flush=True)
        return False
    write_atomically(job.folder / "study_seconds.txt", f"{seconds:.1f}\n".encode())
    print(f"{name}: {seconds:.0f} s", flush=True)
    return True
