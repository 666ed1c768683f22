"""`smopd seeds RECIPE --seeds 0 1 2 3 4`: run a recipe with several seeds, and average the results.

Each seed has its own run directory, OUTPUT/seed_N. Rerun the command to resume.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from smopd import extra  # noqa: F401 reports missing packages

# isort: split
import tyro

from smopd.config.cli import read_settings
from smopd.config.recipe import Mistakes
from smopd.engine.files import write_atomically
from smopd.engine.process import stop_signals
from smopd.report.summary import evaluated_rows, table_columns
from smopd.report.tables import aggregate, markdown


@dataclass(frozen=True)
class Options:
    recipe: Annotated[str, tyro.conf.Positional] = "quickstart"
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    output: Path = Path("runs/seeds")
    """Folder of the seeds' run directories and of `table.md`."""


def main(argv: list[str] | None = None) -> int:
    options = tyro.cli(Options, args=argv, prog="smopd seeds")
    try:
        settings = read_settings(options.recipe)
    except Mistakes as mistakes:
        print("\n".join(f"error: {line}" for line in mistakes.lines), file=sys.stderr)
        return 2
    folders = [options.output / f"seed_{seed}" for seed in options.seeds]
    for seed, folder in zip(options.seeds, folders, strict=True):
        arguments = [options.recipe, "--seed", str(seed), "--output", str(folder)]
        if code := run([sys.executable, "-m", "smopd.train", *arguments]):
            return code
    rows = aggregate([evaluated_rows(settings, folder) for folder in folders])
    text = markdown(rows, table_columns(settings)) + "\n"
    write_atomically(options.output / "table.md", text.encode())
    print(text)
    return 0


def run(command: list[str]) -> int:
    """Run `command`, forward stop signals to it, and return its exit status."""
    child = subprocess.Popen(command)
    for number in stop_signals():
        signal.signal(number, lambda number, frame: child.send_signal(number))
    code = child.wait()
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main())
