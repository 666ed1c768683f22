"""`python -m bench` lists the benchmarks, `python -m bench NAME` runs one; each row is a line of JSON."""

from __future__ import annotations

import importlib
import pkgutil
import sys

import bench


def main() -> int:
    names = sorted(
        module.name for module in pkgutil.iter_modules(bench.__path__) if not module.name.startswith("_")
    )
    if len(sys.argv) == 1:
        for name in names:
            print(f"{name:20} {(importlib.import_module(f'bench.{name}').__doc__ or '').splitlines()[0]}")
        return 0
    if sys.argv[1] not in names:
        print(f"error: no benchmark {sys.argv[1]!r}, expected one of {names}", file=sys.stderr)
        return 2
    importlib.import_module(f"bench.{sys.argv[1]}").main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
