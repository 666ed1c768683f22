"""The study's runs, each a `python -m smopd.train`, several at a time.

The numbers of a job that ended are kept in one small file, and such a job is not run again. An interrupted
job resumes where smopd.train left it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bench.study.experiments import EXPERIMENTS
from bench.study.results import keep, read
from smopd.config.cli import parse
from smopd.config.settings import Settings


@dataclass(frozen=True)
class Job:
    """One recipe with one variant's settings and one seed."""

    experiment: str
    variant: str
    seed: int
    output: Path
    """Of the runs."""
    results: Path
    """Of the files that are kept."""

    @property
    def name(self) -> str:
        return f"{self.experiment}_{self.variant}_seed_{self.seed}"

    @property
    def folder(self) -> Path:
        return self.output / self.name

    @property
    def kept(self) -> Path:
        return self.results / f"{self.name}.json"

    def command(self) -> list[str]:
        experiment = EXPERIMENTS[self.experiment]
        where = ["--seed", str(self.seed), "--output", str(self.folder)]
        settings = experiment.variants[self.variant]
        return [sys.executable, "-m", "smopd.train", str(experiment.path), *where, *settings]

    @property
    def settings(self) -> Settings:
        """As the command takes them now."""
        return parse(self.command()[3:]).settings

    @property
    def complete(self) -> bool:
        """Whether the kept file has every run of the recipe."""
        return self.kept.exists() and set(self.settings.runs) <= set(read(self.kept).runs)


def jobs(experiments: Sequence[str], seeds: Sequence[int], output: Path, results: Path) -> list[Job]:
    """Seed by seed, so that an interrupted study has whole seeds."""
    return [
        Job(name, variant, seed, output, results)
        for seed in seeds
        for name in experiments
        for variant in EXPERIMENTS[name].variants
    ]


def run(wanted: Sequence[Job], at_once: int) -> list[Job]:
    """Runs the jobs that are not complete; what a job prints goes to `study.log` in its folder.

    Returns:
        The jobs that failed.
    """
    due = [job for job in wanted if not job.complete]
    with ThreadPoolExecutor(at_once) as pool:
        return [job for job, code in zip(due, pool.map(_run, due), strict=True) if code]


def _run(job: Job) -> int:
    job.folder.mkdir(parents=True, exist_ok=True)
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    started = time.monotonic()
    with (job.folder / "study.log").open("ab") as log:
        code = subprocess.run(job.command(), stdout=log, stderr=log, env=environment, check=False).returncode
    if code:
        print(f"{job.name}: failed with {code}, see {job.folder / 'study.log'}", flush=True)
        return code
    seconds = time.monotonic() - started
    keep(job.folder, job.kept, seconds)
    print(f"{job.name}: {seconds:.0f} s", flush=True)
    return 0
