"""The study's runs, each a `python -m smopd.train`, several at a time; finished ones are not run again.

Jobs that begin alike (model, demonstrations, seed) share their warm start.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.study.experiments import EXPERIMENTS, SIZES
from smopd.config.cli import parse
from smopd.config.schedule import BASE, is_done
from smopd.config.settings import Settings
from smopd.engine.files import empty_partial, replace_folder, write_atomically
from smopd.run.folder import changes


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
        """The size is in the path, but for `cpu`."""
        root = self.output if self.size == "cpu" else self.output / self.size
        return root / self.experiment / self.variant / f"seed_{self.seed}"

    @property
    def finished(self) -> bool:
        return self.seconds.exists()

    @property
    def seconds(self) -> Path:
        """The file with what the job took."""
        return self.folder / "study_seconds.txt"

    @property
    def begun(self) -> Path:
        """The file with when an unfinished attempt began, and what those before it took."""
        return self.folder / "study_begun.txt"

    def spent(self) -> float:
        """Seconds of the attempts so far; an interrupted one lasted until its log's last line."""
        if self.begun.exists():
            begun, before = map(float, self.begun.read_text().split())
            log = self.folder / "study.log"
            return before + (max(0.0, log.stat().st_mtime - begun) if log.exists() else 0.0)
        return float(self.seconds.read_text()) if self.finished else 0.0

    @property
    def settings(self) -> Settings:
        """Resolved, as the command takes them now."""
        return parse(self.command()[3:]).settings

    @property
    def changes(self) -> dict[str, tuple[Any, Any]]:
        """What the folder was made with, and what the settings are now, where both know a setting."""
        return changes(self.folder, self.settings, new=False)

    @property
    def complete(self) -> bool:
        """Finished, with every run that the recipe has now."""
        settings = self.settings
        return self.finished and all(is_done(settings, run) for run in settings.runs)

    @property
    def base(self) -> Path:
        """Where the warm start is kept that this job shares with all that begin alike."""
        begins = self.settings.model_dump_json(include={"model", "warm_start", "student", "data", "seed"})
        return self.output / "bases" / hashlib.sha256(begins.encode()).hexdigest()[:16]

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


def run(wanted: Sequence[Job], at_once: int, ended: Callable[[Job], object] = lambda job: None) -> list[Job]:
    """Runs the jobs that are not complete; what a job prints goes to `study.log` in its folder.

    Args:
        ended: called with each job that ended well, as it does.
    Returns:
        The jobs that failed.
    """
    due = [job for job in wanted if not job.complete]

    def train(job: Job) -> bool:
        well = _run(job)
        if well:
            ended(job)
        return well

    with ThreadPoolExecutor(at_once) as pool:
        succeeded = pool.map(train, due)
        return [job for job, well in zip(due, succeeded, strict=True) if not well]


_BASES: defaultdict[Path, threading.Lock] = defaultdict(threading.Lock)


def _run(job: Job) -> bool:
    job.folder.mkdir(parents=True, exist_ok=True)
    with _BASES[job.base]:
        before = job.spent()
        started = time.monotonic()
        write_atomically(job.begun, f"{time.time():.1f} {before:.1f}\n".encode())
        code = _share_base(job)
    code = code or _train(job, job.command())
    seconds = time.monotonic() - started
    name = f"{job.experiment}/{job.variant}/seed_{job.seed}"
    if code:
        print(f"{name}: failed with {code}, see {job.folder / 'study.log'}", flush=True)
        return False
    write_atomically(job.seconds, f"{before + seconds:.1f}\n".encode())
    job.begun.unlink()
    print(f"{name}: {seconds:.0f} s", flush=True)
    return True


def _share_base(job: Job) -> int:
    """Brings the warm start to the job's folder, without its evaluation: rewards may be others."""
    own = job.folder / BASE
    if own.exists():
        return 0
    source, target = job.base, own
    if not job.base.exists():
        code = _train(job, [*job.command(), "--stage", "warm-start"])
        if code:
            return code
        source, target = own, job.base
    partial, kept = empty_partial(target), shutil.ignore_patterns("evaluation.json", "responses.jsonl")
    shutil.copytree(source, partial, ignore=kept, dirs_exist_ok=True)
    replace_folder(partial, target)
    return 0


def _train(job: Job, command: Sequence[str]) -> int:
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    with (job.folder / "study.log").open("ab") as log:
        environment = os.environ | threads
        return subprocess.run(command, stdout=log, stderr=log, env=environment, check=False).returncode
