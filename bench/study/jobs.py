"""The jobs of the study. Each runs `python -m smopd.train`, and several run at a time.

A finished job writes a small file with its results, and is not run again. An interrupted job resumes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from bench.study.experiments import EXPERIMENTS
from bench.study.results import keep, read
from smopd.config.cli import parse
from smopd.config.settings import Settings


@dataclass(frozen=True)
class Job:
    """A recipe with the settings of a variant and a seed."""

    experiment: str
    variant: str
    seed: int
    output: Path  # folder of the runs
    results: Path  # folder of the small files

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
        settings = [*experiment.variants[self.variant]]
        if experiment.teachers:
            runs = replace(self, experiment=experiment.teachers).folder
            exports = {each: str(runs / f"{each}_teacher" / "export") for each in ("accuracy", "format")}
            models = [{"model": export, "reward": each} for each, export in exports.items()]
            settings += ["--teachers.models", json.dumps(models)]
        return [sys.executable, "-m", "smopd.train", str(experiment.path), *where, *settings]

    @property
    def settings(self) -> Settings:
        """The settings that the command resolves to."""
        return parse(self.command()[3:]).settings

    @property
    def complete(self) -> bool:
        """Whether the small file has every run of the recipe. For students, it only has to exist."""
        if not self.kept.exists() or EXPERIMENTS[self.experiment].teachers:
            return self.kept.exists()
        return set(self.settings.runs) <= set(read(self.kept).runs)


def jobs(experiments: Sequence[str], seeds: Sequence[int], output: Path, results: Path) -> list[Job]:
    """Return the jobs seed by seed, so that an interrupted study has complete seeds."""
    return [
        Job(name, variant, seed, output, results)
        for seed in seeds
        for name in experiments
        for variant in EXPERIMENTS[name].variants
    ]


def run(wanted: Sequence[Job], at_once: int) -> list[Job]:
    """Run the incomplete jobs, teachers first. Their output goes to `study.log`. Return those that failed."""
    due = [job for job in wanted if not job.complete]
    failed = []
    for students in (False, True):
        some = [job for job in due if bool(EXPERIMENTS[job.experiment].teachers) is students]
        with ThreadPoolExecutor(at_once) as pool:
            failed += [job for job, code in zip(some, pool.map(_run, some), strict=True) if code]
    return failed


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
