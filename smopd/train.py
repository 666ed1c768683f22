"""`python -m smopd.train [RECIPE]`: specialize, merge, evaluate.

Settings are checked before torch is imported, so a mistake is answered at once.
"""

from __future__ import annotations

import signal
import sys

from smopd import extra  # noqa: F401 says what to install

# isort: split
from smopd.config.cli import describe, parse
from smopd.run import launch


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if argv is None:  # until somebody takes it, in silence
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    launch.die_with_parent()
    command = parse(arguments)
    if command.dry_run:
        print(describe(command))
        return 0
    if launch.wanted(command.settings.processes):
        return launch.launch("smopd.train", arguments, command.settings.processes)
    from smopd.run.pipeline import run_recipe

    return run_recipe(command)


if __name__ == "__main__":
    sys.exit(main())
