"""The jobs of the study. Each runs `python -m smopd.train`, and several run at a time.

A finished job writes a small file with its results, and is not run again. An interrupted job resumes.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

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

    @property
    def teachers(self) -> dict[str, str]:
        """Reward -> folder of its teacher, if another experiment trains the teachers."""
        if (experiment := EXPERIMENTS[self.experiment].teachers) is None:
            return {}
        runs = replace(self, experiment=experiment).folder
        return {reward: str(runs / f"{reward}_teacher" / "export") for reward in ("accuracy", "format")}

    def command(self, teachers: Mapping[str, str] | None = None) -> list[str]:
        """Return the command. `teachers` (reward -> path or URL) replaces the property."""
        experiment = EXPERIMENTS[self.experiment]
        where = ["--seed", str(self.seed), "--output", str(self.folder)]
        settings = [*experiment.variants[self.variant]]
        if experiment.teachers:
            models = [{"model": at, "reward": each} for each, at in (teachers or self.teachers).items()]
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
    with (job.folder / "study.log").open("ab") as log, ExitStack() as servers:
        teachers = job.teachers
        if EXPERIMENTS[job.experiment].served:
            teachers = {
                reward: servers.enter_context(_server(path, log, environment))
                for reward, path in teachers.items()
            }
        command = job.command(teachers)
        code = subprocess.run(command, stdout=log, stderr=log, env=environment, check=False).returncode
    if code:
        print(f"{job.name}: failed with {code}, see {job.folder / 'study.log'}", flush=True)
        return code
    seconds = time.monotonic() - started
    keep(job.folder, job.kept, seconds)
    print(f"{job.name}: {seconds:.0f} s", flush=True)
    return 0


@contextmanager
def _server(teacher: str, log: BinaryIO, environment: Mapping[str, str]) -> Iterator[str]:
    """Serve a teacher inside the context. Return its URL when it answers, or when the server has ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    vocabulary = str(json.loads((Path(teacher) / "config.json").read_text())["vocab_size"])
    command = [sys.executable, "-m", "smopd.engine.teacher_server", teacher, "--port", port]
    server = subprocess.Popen([*command, "--vocabulary", vocabulary], stdout=log, stderr=log, env=environment)
    url = f"http://127.0.0.1:{port}"
    token = {"Authorization": f"Bearer {environment.get('SMOPD_SERVER_TOKEN', '').strip()}"}
    asked = urllib.request.Request(f"{url}/health", headers=token)
    try:
        while server.poll() is None:
            with suppress(OSError), urllib.request.urlopen(asked, timeout=5):
                break
            time.sleep(1)
        yield url
    finally:
        server.terminate()
        server.wait()
