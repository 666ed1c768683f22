"""`python -m bench.study`: runs jobs without a result, and fills the tables and figures of the pages."""

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
    """Experiments of bench/study/experiments.py; all if empty."""
    at_once: int = field(default_factory=lambda: max(1, os.cpu_count() or 1))
    """Jobs at a time, one thread each."""
    output: Path = Path("runs/study")
    """Gets the runs."""
    results: Path = Path("docs/study/results")
    """Gets one small file per finished job; such a job is not repeated."""
    train: bool = True
    """Run what has no result; --no-train only shows what is stored."""
    pages: tuple[Path, ...] = ()
    """Pages whose tables are filled from the results, README.md and docs/study.md say."""
    figures: Path | None = None
    """Gets the figures of the pages, docs/study say."""


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
