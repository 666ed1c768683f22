"""`smopd train [RECIPE]`: train the runs of a recipe. Validates the settings before importing torch."""

from __future__ import annotations

import gc
import os
import signal
import sys
from dataclasses import replace

from smopd import extra  # noqa: F401 reports missing packages

# isort: split
from smopd.config.cli import describe, parse
from smopd.config.settings import Model
from smopd.data.places import located
from smopd.run import launch


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if argv is None:  # no traceback until Stop handles it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    launch.die_with_parent()
    command = parse(arguments)
    if command.dry_run:
        print(describe(command), flush=True)
        if command.show_settings:
            return 0
        if not on_this_machine(command.settings.model):
            print(f"the rewards were not tried: {command.settings.model.path} is not on this machine")
            return 0
        from smopd.run.pipeline import try_recipe

        return try_recipe(command)
    if command.settings.processes > 1 and "RANK" not in os.environ:  # then this process is no rank
        return launch.launch("smopd.train", arguments, command.settings.processes)
    from smopd.run.pipeline import run_recipe

    if argv is None:
        gc.freeze()  # collections take a third of a second less without the modules
    return run_recipe(replace(command, settings=launch.with_processes(command.settings)))


def on_this_machine(model: Model) -> bool:
    """Return whether the model is made here, in a folder, or in the cache of the hub."""
    from huggingface_hub import try_to_load_from_cache

    try:
        folder = model.factory is not None or located(str(model.path)).exists()
        return folder or isinstance(try_to_load_from_cache(str(model.path), "config.json"), str)
    except (OSError, ValueError):  # an absent short name, no hub id
        return False


if __name__ == "__main__":
    sys.exit(main())
