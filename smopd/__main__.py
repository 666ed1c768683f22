"""`smopd COMMAND ...`: run a command. `python -m smopd.COMMAND` does the same."""

import os
import sys
from importlib import import_module

from smopd import __version__
from smopd.names import nearest

COMMANDS = {
    "train": ("smopd.train", "train a recipe: teachers, the merged student, their evaluation"),
    "evaluate": ("smopd.evaluate", "score a model or saved responses on a benchmark"),
    "export": ("smopd.export", "write a checkpoint as a model folder"),
    "push": ("smopd.push", "upload a finished run to the Hugging Face Hub, with a model card"),
    "merge": ("smopd.merge", "merge the weights of models with one base, without training"),
    "data": ("smopd.data.__main__", "fetch the data of recipes and benchmarks"),
}
"""Command -> the module that defines `main(argv) -> exit status`, and a description of the command."""


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("--help", "-h"):
        print("usage: smopd COMMAND ... | --version\n")
        for name, (_, about) in COMMANDS.items():
            print(f"  {name:<10}{about}")
        print("\nRun smopd COMMAND --help for its options.")
        return 0
    if arguments[0] == "--version":
        print(f"smopd {__version__}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        known = ", ".join(COMMANDS)
        print(f"error: no command {name!r}{nearest(name, COMMANDS)}; there are {known}", file=sys.stderr)
        return 2
    return import_module(COMMANDS[name][0]).main(rest) or 0


def console() -> int:
    """Entry point of the installed `smopd`. Adds the current folder to sys.path, as `python -m` does."""
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11's -P
        sys.path.insert(0, os.getcwd())
    return main()


if __name__ == "__main__":
    sys.exit(main())
