"""`smopd COMMAND ...`, or `python -m smopd COMMAND ...`: every command under one name.

Each command is a module that `python -m` runs alone too; only the one that is asked for is imported.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

from smopd import __version__
from smopd.names import nearest

COMMANDS = {
    "train": ("smopd.train", "train a recipe: teachers, the merged student, their evaluation"),
    "evaluate": ("smopd.evaluate", "score a model, or saved responses, on a suite"),
    "plan": ("smopd.plan", "the memory that a recipe needs on each GPU"),
    "merge": ("smopd.merge", "models of one base merged by their weights, without training"),
    "data": ("smopd.data.__main__", "the data that recipes and evaluations name"),
    "seeds": ("smopd.seeds", "a recipe over several seeds, as one table"),
}
"""A command's module, whose `main(argv)` returns the exit status, and what it does."""


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("--help", "-h"):
        print("usage: smopd COMMAND ... | --version\n")
        for name, (_, about) in COMMANDS.items():
            print(f"  {name:<10}{about}")
        print("\nsmopd COMMAND --help says more.")
        return 0
    if arguments[0] == "--version":
        print(f"smopd {__version__}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        known = ", ".join(COMMANDS)
        print(f"error: {name!r} is no command{nearest(name, COMMANDS)}; there are {known}", file=sys.stderr)
        return 2
    return import_module(COMMANDS[name][0]).main(rest) or 0


def console() -> int:
    """The installed `smopd`: finds a reward beside the recipe, as `python -m` does, and runs `main`."""
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11's -P
        sys.path.insert(0, os.getcwd())
    return main()


if __name__ == "__main__":
    sys.exit(main())
