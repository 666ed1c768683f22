"""`python -m bench.study`: run the jobs without a result, and make the tables and figures of the pages."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from bench.study.experiments import EXPERIMENTS
from bench.study.jobs import jobs, run
from bench.study.pages import draw, filled, stored
from bench.study.results import table


@dataclass(frozen=True)
class Options:
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    only: tuple[str, ...] = ()
    """Names of experiments in bench/study/experiments.py. If empty, all of them."""
    at_once: int = field(default_factory=lambda: max(1, os.cpu_count() or 1))
    """Number of jobs at a time. Each has one thread."""
    output: Path = Path("runs/study")
    """Folder for the runs."""
    results: Path = Path("docs/study/results")
    """Folder for one small file per finished job. A job with such a file is not repeated."""
    train: bool = True
    """Run the jobs without a result. --no-train only shows the stored results."""
    pages: tuple[Path, ...] = ()
    """Pages whose tables are filled from the results, such as README.md and docs/study.md."""
    figures: Path | None = None
    """Folder for the figures of the pages, such as docs/study."""


def main(argv: list[str] | None = None) -> int:
    options = tyro.cli(Options, args=argv, prog="python -m bench.study", description=__doc__)
    if unknown := [name for name in options.only if name not in EXPERIMENTS]:
        print(f"error: --only {unknown[0]}: expected one of {', '.join(EXPERIMENTS)}", file=sys.stderr)
        return 2
    names = options.only or tuple(EXPERIMENTS)
    wanted = jobs(names, options.seeds, options.output, options.results)
    failed = run(wanted, options.at_once) if options.train else []
    for name in names:
        for variant in EXPERIMENTS[name].variants:
            if results := stored(options.results, name, variant):
                print(f"\n## {name}, {variant}: {len(results)} seeds\n")
                print(table(results, EXPERIMENTS[name].baseline))
    for page in options.pages:
        page.write_text(filled(page.read_text(), options.results))
    if options.figures:
        draw(options.figures, options.results)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
