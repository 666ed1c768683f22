"""`python -m bench.study --size cpu`: the runs that are not finished, then docs/study.md with its figures."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
import tyro

from bench.study.chapters import CHAPTERS
from bench.study.experiments import EXPERIMENTS
from bench.study.finished import Study
from bench.study.jobs import Job, jobs, run
from bench.study.kept import forget, keep, restore
from bench.study.page import page
from smopd.engine.files import write_atomically


@dataclass(frozen=True)
class Options:
    size: Literal["cpu", "gpu"] = "cpu"
    seeds: tuple[int, ...] = (0, 1, 2)
    only: tuple[str, ...] = ()
    """Experiments to run, of those in bench/study/experiments.py; all where none is named."""
    at_once: int = field(default_factory=lambda: max(1, os.cpu_count() or 1))
    """Runs at a time."""
    output: Path = Path("runs/study")
    pages: Path = Path("docs")
    """Gets study.md and study/: figures, and the numbers of finished jobs, which are not run again."""
    page_only: bool = False
    """Write the page from what is finished; run nothing."""

    @property
    def results(self) -> Path:
        return self.pages / "study" / "results"


def main(argv: list[str] | None = None) -> int:
    options = tyro.cli(Options, args=argv, prog="python -m bench.study", description=__doc__)
    unknown = [name for name in options.only if name not in EXPERIMENTS]
    if unknown:
        print(f"error: --only {unknown[0]}: expected one of {', '.join(EXPERIMENTS)}", file=sys.stderr)
        return 2
    wanted = jobs(options.only or tuple(EXPERIMENTS), options.seeds, options.output, options.size)
    shown = jobs(tuple(EXPERIMENTS), options.seeds, options.output, options.size)
    restore(shown, options.results)
    stale = others(wanted)
    failed = [] if options.page_only else train([job for job in wanted if job not in stale], options)
    write_page(options, [job for job in shown if job.finished and not job.changes])
    return 1 if failed or stale else 0


def train(wanted: list[Job], options: Options) -> list[Job]:
    """Runs what is not complete and keeps the numbers of what ended well; those that failed."""
    due = [job for job in wanted if not job.complete]
    for job in due:
        forget(job)
    return run(due, options.at_once, ended=lambda job: keep(job, options.results))


def others(wanted: list[Job]) -> list[Job]:
    """Those whose folder was made with other settings; says of each which, and that it is left out."""
    found = []
    for job in wanted:
        if changed := job.changes:
            found.append(job)
            print(f"error: {job.folder} was made with other settings and is left out:", file=sys.stderr)
            for key, (before, now) in changed.items():
                print(f"  {key}: was {before!r}, now {now!r}", file=sys.stderr)
    return found


def write_page(options: Options, done: list[Job]) -> None:
    """docs/study.md of all chapters whose runs are there."""
    torch.set_num_threads(1)
    figures = options.pages / "study"
    folders: dict[tuple[str, str], list[Path]] = {}
    for job in sorted(done, key=lambda job: job.seed):
        folders.setdefault((job.experiment, job.variant), []).append(job.folder)
    study = Study(folders)
    chapters = [chapter for write in CHAPTERS.values() if (chapter := write(study, figures)) is not None]
    text = page(chapters, [job.folder for job in done], options.size)
    write_atomically(options.pages / "study.md", text.encode())
    print(options.pages / "study.md")


if __name__ == "__main__":
    sys.exit(main())
