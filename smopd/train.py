"""`smopd train [RECIPE]`: train the runs of a recipe. Validates the settings before importing torch."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from smopd import extra  # noqa: F401 reports missing packages

# isort: split
from smopd.config.cli import Command, describe, parse
from smopd.run import launch


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if argv is None:  # no traceback until Stop handles it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    launch.die_with_parent()
    command = parse(arguments)
    if command.dry_run:
        print(describe(command), flush=True)
        return preflight(command)
    if launch.wanted(command.settings.processes):
        return launch.launch("smopd.train", arguments, command.settings.processes)
    from smopd.run.pipeline import run_recipe

    return run_recipe(command)


def preflight(command: Command) -> int:
    """Read the data and call every reward once, if the model is on this machine."""
    model = command.settings.model
    if model.factory is None and not Path(str(model.path)).expanduser().exists():
        print(f"# rewards were not tried: there is no folder {model.path}")
        return 0
    from smopd.run.pipeline import try_recipe

    return try_recipe(command)


if __name__ == "__main__":
    sys.exit(main())
