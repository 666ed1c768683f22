"""`python -m smopd.data` lists the data sets. `python -m smopd.data fetch NAME ...` downloads those named."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from smopd import extra  # noqa: F401 reports missing packages

# isort: split
from smopd.data.places import VARIABLE, DataSet, catalogue, data_folder
from smopd.names import nearest


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return 1 if a download failed, 2 if a name is unknown, else 0."""
    parser = argparse.ArgumentParser(prog="python -m smopd.data", description="The data sets.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser("list", help="list them (the default)")
    named = commands.add_parser("fetch", help="download them into the data folder")
    named.add_argument("names", nargs="+", metavar="NAME", help=", ".join(catalogue()))
    asked = parser.parse_args(argv)
    folder = data_folder()
    if asked.command != "fetch":
        show_list(folder)
        return 0
    if unknown := [name for name in asked.names if name not in catalogue()]:
        hint = nearest(unknown[0], catalogue()) or "; there are " + ", ".join(catalogue())
        print(f"smopd.data: no data set {unknown[0]!r}{hint}", file=sys.stderr)
        return 2
    wanted = [catalogue()[name] for name in dict.fromkeys(asked.names)]
    for each in wanted:
        print(f"{each.name}: {each.licence}" + (f"; {each.notice}" if each.notice else ""))

    from smopd.data.fetch import fetch

    failures, by_hand = fetch(wanted, folder)
    for text in by_hand:
        print(text)
    for text in failures:
        print(f"smopd.data: {text}", file=sys.stderr)
    for each in wanted:
        print(f"{each.name}: {presence(each, folder)} in {folder / each.name}")
    return 1 if failures else 0


def show_list(folder: Path) -> None:
    """Print each data set with its state, size, licence and source, and the data folder."""
    for each in catalogue().values():
        size = f"{sum(file.bytes or 0 for file in each.files) / 1e6:.1f} MB"
        print(f"{each.name:10} {presence(each, folder)}, {size}, {each.licence}, from {each.source}")
        print(f"{'':10} {each.about}")
    origin = VARIABLE if os.environ.get(VARIABLE) else f"the user's cache; {VARIABLE} names another"
    print(f"Folder: {folder} ({origin}). To download: python -m smopd.data fetch NAME ...")


def presence(each: DataSet, folder: Path) -> str:
    """Return `whole`, `absent` or `partly (n of m files)`. File contents are not checked."""
    there = sum((folder / file.path).is_file() for file in each.files)
    if there == len(each.files):
        return "whole"
    return f"partly ({there} of {len(each.files)} files)" if there else "absent"


if __name__ == "__main__":
    sys.exit(main())
