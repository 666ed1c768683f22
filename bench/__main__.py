"""`python -m bench` lists the benchmarks, `python -m bench NAME` runs one; each row is a line of JSON."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Sequence

import bench


def main(arguments: Sequence[str]) -> int:
    """The exit status: 0, 1 where a row was refused, 2 for a benchmark that is not there."""
    names = sorted(
        module.name for module in pkgutil.iter_modules(bench.__path__) if not module.name.startswith("_")
    )
    if not arguments:
        for name in names:
            print(f"{name:20} {(importlib.import_module(f'bench.{name}').__doc__ or '').splitlines()[0]}")
        return 0
    if len(arguments) > 1 or arguments[0] not in names:
        print(f"error: no benchmark {' '.join(arguments)!r}, expected one of {names}", file=sys.stderr)
        return 2
    return importlib.import_module(f"bench.{arguments[0]}").main()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
