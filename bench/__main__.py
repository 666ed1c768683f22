"""Benchmarks of the operations, a JSON line a row.

python -m bench                        what there is
python -m bench NAME... [options]      run some
python -m bench --all [options]        run all
python -m bench table FILE...          rows as a table (Markdown where the output is no terminal)
python -m bench plot FILE [IMAGE]      rows as a plot (needs matplotlib)
python -m bench gpu [FOLDER]           what `make gpu` runs, into FOLDER (default: $OUT, or bench/results)
python -m bench gpu-peers [FOLDER]     other libraries beside ours, and a trace of one call
python -m bench gpu --dry-run          the jobs, their commands and times; needs no GPU (gpu-peers likewise)
python -m bench targets FILE...        rows of a GPU beside what docs/kernels.md asks of them
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import bench
from bench.gpu import command as gpu
from bench.gpu import targets
from bench.harness import record, report
from bench.harness.run import Options, run_benchmarks

SCRIPTS = ("teacher_scoring",)  # of whole engines, run by their own names


def names() -> list[str]:
    """The benchmarks, by name."""
    modules = [module.name for module in pkgutil.iter_modules(bench.__path__) if not module.ispkg]
    return sorted(name for name in modules if not name.startswith(("_", "test_")) and name not in SCRIPTS)


def main(arguments: Sequence[str]) -> int:
    """The exit status: 0, 1 where a row of ours was refused, 2 for arguments that make no sense."""
    if not arguments:
        for name in names():
            print(f"{name:20} {(_module(name).__doc__ or '').splitlines()[0]}")
        return 0
    command, *rest = arguments
    try:
        if command in ("table", "plot", "targets") and not rest:
            raise ValueError(f"{command}: a file is expected")
        if command == "table":
            return report.table(record.rows_of([Path(name) for name in rest]))
        if command == "plot":
            return report.plot(record.rows_of([Path(rest[0])]), Path(rest[1] if rest[1:] else "bench.png"))
        if command == "targets":
            print(targets.table(record.rows_of([Path(name) for name in rest])))
            return 0
        if command in gpu.PLANS:
            return gpu.main(command, rest, names())
        return _run(_parse(arguments))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _module(name: str):
    return importlib.import_module(f"bench.{name}")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.description = __doc__
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--all", action="store_true", help="every benchmark")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it work, not how fast is it")
    parser.add_argument("--check", action="store_true", help="hard shapes, checked and not timed")
    parser.add_argument("--smoke", action="store_true", help="64 rows of a GPU's sizes, checked alone")
    parser.add_argument("--main", action="store_true", help="each benchmark's main cases alone")
    parser.add_argument("--seconds", type=float, help="of timing a case, all its providers together")
    words = "names, kinds or backends, with commas between"
    parser.add_argument("--providers", default="", help=f"only these {words}")
    parser.add_argument("--without", default="", help=f"all but these {words}")
    parser.add_argument("--deadline", type=float, help="seconds after which no further case is begun")
    parser.add_argument("--output", type=Path, help="rows go to this file as well")
    return parser.parse_args(arguments)


def _run(arguments: argparse.Namespace) -> int:
    chosen = names() if arguments.all else arguments.names
    unknown = [name for name in chosen if name not in names()]
    if unknown or not chosen:
        raise ValueError(f"no benchmark {' '.join(unknown)!r}, expected some of {names()}")
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options = Options(
        device=device,
        case_set=_case_set(arguments, device),
        seconds=0.02 if arguments.quick and arguments.seconds is None else arguments.seconds,
        providers=tuple(filter(None, arguments.providers.split(","))),
        without=tuple(filter(None, arguments.without.split(","))),
        deadline=None if arguments.deadline is None else time.monotonic() + arguments.deadline,
        main_only=arguments.main,
    )
    file = None
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        file = arguments.output.open("a")
    try:
        tell = record.teller(device, file)
        return int(run_benchmarks({name: _module(name).BENCHMARK for name in chosen}, options, tell) > 0)
    finally:
        if file is not None:
            file.close()


def _case_set(arguments: argparse.Namespace, device: str) -> str:
    return next((name for name in ("check", "smoke", "quick") if getattr(arguments, name)), device)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
