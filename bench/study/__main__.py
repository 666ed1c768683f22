"""`python -m bench.study`: runs what is not finished, then prints the tables and draws the figures."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from bench.study.experiments import EXPERIMENTS
from bench.study.jobs import jobs, run
from bench.study.results import levels, read, table


@dataclass(frozen=True)
class Options:
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    only: tuple[str, ...] = ()
    """Experiments of bench/study/experiments.py; all where none is named."""
    at_once: int = field(default_factory=lambda: max(1, os.cpu_count() or 1))
    """Jobs at a time, one thread each."""
    output: Path = Path("runs/study")
    """Gets the runs."""
    results: Path = Path("docs/study/results")
    """Gets one small file a finished job; such a job is not run again."""
    figures: Path | None = None
    """Gets EXPERIMENT_VARIANT.png."""
    train: bool = True
    """Run what has no result; --no-train only shows what there is."""


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
            kept = [job.kept for job in wanted if (job.experiment, job.variant) == (name, variant)]
            if results := [read(path) for path in kept if path.exists()]:
                print(f"\n## {name}, {variant}: {len(results)} seeds\n\n{table(name, results)}")
                if options.figures:
                    levels(options.figures / f"{name}_{variant}.png", results)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
