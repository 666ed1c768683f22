"""Compiles every Triton kernel as it ships, for three GPU generations and without a GPU; reads what came out.

    python -m tests.kernels.offline             compiles what changed: a table, and what breaks the rules
    python -m tests.kernels.offline --all       compiles everything
    python -m tests.kernels.offline --update    the same as the first, and the table becomes the bounds

The launchers are called with tensors that have no memory (device "meta") and every launch is noted down
instead of made: kernel, dtypes, alignment, integers, constexprs, warps. So what is compiled is what runs, and
nothing that ships is listed twice. A launcher that asked the device for a value would raise.

A bound is recorded with a digest of all that Triton compiles (`Launch.digest`). Where that is the same and
Triton too, so is the machine code: only the first launch of each kernel is compiled again, for each
architecture, so that the compiler is seen to work.

Run it without TRITON_INTERPRET: Triton decides when a kernel is decorated.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import triton

from tests.kernels.offline.offline_code import Built, build
from tests.kernels.offline.offline_launches import CAPABILITIES, Launch, launches_of, shipped_kernels

BOUNDS = Path(__file__).with_name("offline_bounds.json")
MAX_SHARED = 163 << 10  # bytes that a block can have on sm_80, the least of the three

# How much worse than recorded a number may get.
REGISTER_SLACK = 8
SHARED_SLACK = 1024
LOOP_SLACK = 1.05  # instructions; shuffles and barriers have none


def faults(built: Built) -> list[str]:
    """What no kernel may have, whatever is recorded."""
    found = []
    if built.stack or built.local:
        found.append(
            f"{built.name}: spills ({built.stack} bytes of stack, {built.local} accesses), expected none"
        )
    if built.shared > MAX_SHARED:
        found.append(f"{built.name}: {built.shared} bytes of shared memory, expected at most {MAX_SHARED}")
    return found


def regressions(built: Built, recorded: Mapping[str, Any] | None) -> list[str]:
    """What got worse than recorded by more than the slack."""
    if recorded is None:
        return [f"{built.name}: not recorded, run python -m tests.kernels.offline --update"]
    found = []
    for name, value in built.held.items():
        limit = recorded[name] + {"registers": REGISTER_SLACK, "shared": SHARED_SLACK}.get(name, 0)
        if name == "instructions":
            limit = int(recorded[name] * LOOP_SLACK)
        if value > limit:
            found.append(f"{built.name}: {value} {name}, recorded {recorded[name]}, expected at most {limit}")
    return found


def load_bounds() -> dict[str, dict[str, Any]] | None:
    """By name of a launch; None where they were recorded with another Triton."""
    stored = json.loads(BOUNDS.read_text()) if BOUNDS.exists() else {}
    if stored.get("triton") != triton.__version__:
        return None
    return {name: dict(zip(stored["columns"], row, strict=True)) for name, row in stored["rows"].items()}


def store_bounds(rows: Mapping[str, dict[str, Any]]) -> None:
    """Every row has the same columns."""
    columns = json.dumps(list(next(iter(rows.values()))))
    lines = [f"  {json.dumps(name)}: {json.dumps(list(row.values()))}" for name, row in sorted(rows.items())]
    head = f'{{"triton": "{triton.__version__}",\n "columns": {columns},\n "rows": {{\n'
    BOUNDS.write_text(head + ",\n".join(lines) + "\n}}\n")


def to_build(launches: Sequence[Launch], bounds: Mapping[str, dict[str, Any]]) -> list[Launch]:
    """Those that are not what was recorded, and the first launch of each kernel for each architecture."""
    first = {(launch.kernel, launch.capability): launch.name for launch in reversed(launches)}
    return [
        launch
        for launch in launches
        if first[launch.kernel, launch.capability] == launch.name
        or bounds.get(launch.name, {}).get("digest") != launch.digest
    ]


def table(builts: Sequence[Built]) -> Iterator[str]:
    yield (
        f"{'kernel and case':70} {'regs':>4} {'stack':>5} {'shared':>6} {'warps':>5}  "
        "main loops: instructions (per element), shuffles, barriers"
    )
    for built in sorted(builts, key=lambda built: built.name):
        loops = []
        for loop in built.loops:
            moved = max(loop.loaded_bytes, loop.stored_bytes) // built.itemsize
            each = f" ({loop.instructions / moved:.1f})" if moved else ""
            loops.append(f"{loop.instructions}{each} {loop.shuffles} {loop.barriers}")
        yield (
            f"{built.name:70} {built.registers:4} {built.stack:5} {built.shared:6} {built.warps:5}  "
            f"{' | '.join(loops)}"
        )


def build_all(launches: Sequence[Launch], jobs: int) -> list[Built]:
    """In `jobs` processes, a capability after the other."""
    context = multiprocessing.get_context("spawn")
    ordered = sorted(launches, key=lambda launch: (launch.capability, launch.kernel))
    with context.Pool(jobs) as pool:
        return pool.map(build, ordered, chunksize=4)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.offline")
    parser.add_argument("--all", action="store_true", help="compile also what is as it was recorded")
    parser.add_argument("--update", action="store_true", help="record what was compiled as the bounds")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--only", default="", help="launches whose name holds this")
    parser.add_argument("--list", action="store_true", help="names of the launches, nothing compiled")
    parsed = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("error: TRITON_INTERPRET=1 is set, expected a process without it", file=sys.stderr)
        return 2
    if parsed.update and parsed.only:
        parser.error("--update records all launches, expected no --only")
    from tests.kernels.offline import offline_cases

    launches = launches_of(offline_cases.cases)
    unreached = shipped_kernels(offline_cases.MODULES) - {launch.kernel for launch in launches}
    wrong = [f"{name}: no case launches it" for name in sorted(unreached)]
    chosen = [launch for launch in launches if parsed.only in launch.name]
    if parsed.list:
        print("\n".join(sorted(launch.name for launch in chosen)), len(chosen), sep="\n")
        return 0
    bounds = load_bounds()
    todo = chosen if parsed.all or bounds is None else to_build(chosen, bounds)
    builts = build_all(todo, parsed.jobs)
    print("\n".join(table(builts)))
    wrong += [fault for built in builts for fault in faults(built)]
    if parsed.update and not wrong:
        new = {built.name: {"digest": built.digest, **built.held} for built in builts}
        rows = {**(bounds or {}), **new}
        store_bounds({launch.name: rows[launch.name] for launch in launches})
        bounds = load_bounds()
    if bounds is None:
        print(
            f"no bounds recorded with Triton {triton.__version__}: only spills and shared memory are judged"
        )
    else:
        wrong += [fault for built in builts for fault in regressions(built, bounds.get(built.name))]
    architectures = ", ".join(f"sm_{capability}" for capability in CAPABILITIES)
    print(
        "\n".join(wrong)
        or f"{len(chosen)} kernels for {architectures}, {len(builts)} of them compiled now: all hold"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
