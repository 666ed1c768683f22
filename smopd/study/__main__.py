"""`python -m smopd.study --size cpu`: the runs that are not finished, then docs/study.md with its figures."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
import tyro

from smopd.files import write_atomically
from smopd.study.chapters import CHAPTERS, Chapter
from smopd.study.experiments import EXPERIMENTS
from smopd.study.jobs import Job, jobs, run
from smopd.study.measures import seconds

INTRODUCTION = """# The study in small

The paper's comparisons in worlds that a small machine can carry, by `python -m smopd.study --size {size}`:
{seeds} seeds, {hours:.1f} hours of runs ({at_once} at a time, a thread each). A ± is one standard deviation
over the seeds. Where these worlds contradict the paper, that is a finding about them and it, and stands here.
"""


@dataclass(frozen=True)
class Options:
    size: Literal["cpu", "gpu"] = "cpu"
    seeds: tuple[int, ...] = (0, 1, 2)
    only: tuple[str, ...] = ()
    """Experiments to run: curves, density, ablations, profiles, conflict, snips; all where none is named."""
    at_once: int = field(default_factory=lambda: max(1, os.cpu_count() or 1))
    """Runs at a time."""
    output: Path = Path("runs/study")
    pages: Path = Path("docs")
    """Gets study.md and a folder of figures, study/."""
    page_only: bool = False
    """Write the page from what is finished; run nothing."""


def main(argv: list[str] | None = None) -> int:
    options = tyro.cli(Options, args=argv, prog="python -m smopd.study", description=__doc__)
    unknown = [name for name in options.only if name not in EXPERIMENTS]
    if unknown:
        print(f"error: --only {unknown[0]}: expected one of {', '.join(EXPERIMENTS)}", file=sys.stderr)
        return 2
    wanted = jobs(options.only or tuple(EXPERIMENTS), options.seeds, options.output, options.size)
    failed = [] if options.page_only else run(wanted, options.at_once)
    write_page(options, [job for job in wanted if job.finished])
    return 1 if failed else 0


def write_page(options: Options, done: list[Job]) -> None:
    """docs/study.md of all chapters whose runs are there."""
    torch.set_num_threads(1)
    figures = options.pages / "study"
    chapters = [chapter(options.output, figures) for chapter in CHAPTERS.values()]
    introduction = INTRODUCTION.format(
        size=options.size,
        seeds=len({job.seed for job in done}),
        hours=seconds([job.folder for job in done]) / 3600,
        at_once=options.at_once,
    )
    parts = [introduction, *(section(chapter) for chapter in chapters if chapter is not None)]
    write_atomically(options.pages / "study.md", "\n".join(parts).encode())
    print(options.pages / "study.md")


def section(chapter: Chapter) -> str:
    picture = f"\n![{chapter.title}](study/{chapter.figure})\n" if chapter.figure else ""
    return f"## {chapter.title}\n{picture}\n{chapter.text}\n"


if __name__ == "__main__":
    sys.exit(main())
