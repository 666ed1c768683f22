"""`python -m smopd.seeds RECIPE --seeds 0 1 2 3 4`: a recipe over seeds, and its table of means and spreads.

Each seed has its own run directory, OUTPUT/seed_N; finished seeds are not run again.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Annotated

from smopd import extra  # noqa: F401 says what to install

# isort: split
import tyro

from smopd.config.cli import read_settings
from smopd.config.recipe import Mistakes
from smopd.engine.files import write_atomically
from smopd.report.summary import evaluated_rows, table_columns
from smopd.report.tables import aggregate, markdown


@dataclass(frozen=True)
class Options:
    recipe: Annotated[str, tyro.conf.Positional] = "quickstart"
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    output: Path = field(default_factory=lambda: Path("runs/seeds"))
    """Where the seeds' run directories and `table.md` go."""


def main(argv: list[str] | None = None) -> int:
    options = tyro.cli(Options, args=argv, prog="python -m smopd.seeds")
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
    """The exit status of `command`, which is given the signals that come here and time to end by them."""

    def hand_on(number: int, frame: FrameType | None) -> None:
        if child is not None:
            child.send_signal(number)

    child = None
    before = {number: signal.signal(number, hand_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        child = subprocess.Popen(command)
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main())
