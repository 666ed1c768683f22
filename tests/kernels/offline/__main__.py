"""Compiles every Triton kernel as it ships, for three GPU generations and without a GPU; reads what came out.

    python -m tests.kernels.offline             compiles what changed: a table, and what breaks the rules
    python -m tests.kernels.offline --all       compiles everything
    python -m tests.kernels.offline --update    the same as the first, and the table becomes the bounds

The launchers are called with tensors that have no memory (device "meta") and every launch is noted down
instead of made: kernel, dtypes, alignment, integers, constexprs, warps. So what is compiled is what runs, and
nothing that ships is listed twice. A launcher that asked the device for a value would raise.

Bounds are of one version of Triton, in bounds/<version>.json. With a version that has none, spills and shared
memory are judged, and what got worse than with the newest version that has bounds is printed. A bound is
recorded with a digest of all that Triton compiles (`Launch.digest`). Where that is the same, so is the
machine code: only the first launch of each kernel is compiled again, for each architecture, so that the
compiler is seen to work.

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
from packaging.version import Version

from tests.kernels.offline.known_spills import KNOWN_SPILLS, MOST_SM_90
from tests.kernels.offline.offline_code import Built, build
from tests.kernels.offline.offline_launches import CAPABILITIES, Launch, launches_of, shipped_kernels

BOUNDS = Path(__file__).with_name("bounds")
COLUMNS = ["digest", "registers", "shared", "instructions", "shuffles", "barriers", "outside"]
FUSION = "enable_fp_fusion"  # off by default from Triton 3.10 on
MAX_SHARED = 163 << 10  # bytes that a block can have on sm_80, the least of the three

# How much worse than recorded a number may get.
REGISTER_SLACK = 8
SHARED_SLACK = 1024
CODE_SLACK = 1.05  # instructions, in main loops and outside; shuffles and barriers have none


def faults(built: Built, known: Mapping[str, int]) -> list[str]:
    """What no kernel may have, whatever is recorded. known: launches that spill, and how many bytes."""
    found = []
    allowed = known.get(built.name)
    if allowed is None and (built.stack or built.local):
        found.append(
            f"{built.name}: spills ({built.stack} bytes of stack, {built.local} accesses), expected none"
        )
    if allowed is not None and built.stack != allowed:
        found.append(f"{built.name}: spills {built.stack} bytes, known_spills.py says {allowed}")
    if built.shared > MAX_SHARED:
        found.append(f"{built.name}: {built.shared} bytes of shared memory, expected at most {MAX_SHARED}")
    return found


def unknown_spills(launches: Sequence[Launch]) -> list[str]:
    """Entries of known_spills.py, of any version, that excuse nothing or what they may not."""
    names = {launch.name for launch in launches}
    found = []
    for version, spills in KNOWN_SPILLS.items():
        found += [
            f"{name}: in known_spills.py for Triton {version}, but nothing launches it"
            for name in sorted(spills.keys() - names)
        ]
        found += [
            f"{name}: spills {size} bytes, expected at most {MOST_SM_90} on sm_90"
            for name, size in spills.items()
            if name.endswith("sm_90") and size > MOST_SM_90
        ]
    return found


def regressions(built: Built, recorded: Mapping[str, Any] | None) -> list[str]:
    """What got worse than recorded by more than the slack."""
    if recorded is None:
        return [f"{built.name}: not recorded, run python -m tests.kernels.offline --update"]
    found = []
    for name, value in built.held.items():
        if name not in recorded:  # main counts them
            continue
        limit = recorded[name] + {"registers": REGISTER_SLACK, "shared": SHARED_SLACK}.get(name, 0)
        if name in ("instructions", "outside"):
            limit = int(recorded[name] * CODE_SLACK)
        if value > limit:
            found.append(f"{built.name}: {value} {name}, recorded {recorded[name]}, expected at most {limit}")
    return found


def bounds_file(version: str) -> Path:
    return BOUNDS / f"{version}.json"


def recorded_versions() -> list[str]:
    """The oldest first."""
    return sorted((path.stem for path in BOUNDS.glob("*.json")), key=Version)


def load_bounds(version: str | None = None) -> dict[str, dict[str, Any]] | None:
    """By name of a launch; None where none were recorded with this Triton. A column may have come since."""
    path = bounds_file(version or triton.__version__)
    if not path.exists():
        return None
    stored = json.loads(path.read_text())
    rows = {name: zip(stored["columns"], row, strict=True) for name, row in stored["rows"].items()}
    return {name: {key: value for key, value in row if value is not None} for name, row in rows.items()}


def store_bounds(rows: Mapping[str, dict[str, Any]]) -> None:
    """A row that lacks a column has null there."""
    lines = [
        f"  {json.dumps(name)}: {json.dumps([row.get(column) for column in COLUMNS])}"
        for name, row in sorted(rows.items())
    ]
    head = f'{{"columns": {json.dumps(COLUMNS)},\n "rows": {{\n'
    BOUNDS.mkdir(exist_ok=True)
    bounds_file(triton.__version__).write_text(head + ",\n".join(lines) + "\n}}\n")


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
        f"{'kernel and case':70} {'regs':>4} {'stack':>5} {'shared':>6} {'warps':>5} {'outside':>7}  "
        "main loops: instructions (per element), shuffles, barriers"
    )
    for built in sorted(builts, key=lambda built: built.name):
        loops = []
        for loop in built.loops:
            moved = max(loop.loaded_bytes, loop.stored_bytes) // built.itemsize
            each = f" ({loop.instructions / moved:.1f})" if moved else ""
            loops.append(f"{loop.instructions}{each} {loop.shuffles} {loop.barriers}")
        yield (
            f"{built.name:70} {built.registers:4} {built.stack:5} {built.shared:6} {built.warps:5} "
            f"{built.outside:7}  "
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
    wrong += [
        f"{launch.name}: does not ask for {FUSION}"
        for launch in launches
        if dict(launch.options).get(FUSION) is not True
    ]
    chosen = [launch for launch in launches if parsed.only in launch.name]
    if parsed.list:
        print("\n".join(sorted(launch.name for launch in chosen)), len(chosen), sep="\n")
        return 0
    bounds = load_bounds()
    newest = next(reversed(recorded_versions()), None)
    nearest = bounds or (load_bounds(newest) if newest else None) or {}
    everything = parsed.all or (parsed.update and bounds is None)
    todo = chosen if everything else to_build(chosen, nearest)
    builts = build_all(todo, parsed.jobs)
    print("\n".join(table(builts)))
    known = KNOWN_SPILLS.get(triton.__version__, {})
    wrong += unknown_spills(launches)
    wrong += [fault for built in builts for fault in faults(built, known)]
    if parsed.update and not wrong:
        new = {built.name: {"digest": built.digest, **built.held} for built in builts}
        rows = {**(bounds or {}), **new}
        store_bounds({launch.name: rows[launch.name] for launch in launches})
        bounds = load_bounds()
    if bounds is None:
        print(f"no bounds recorded with Triton {triton.__version__}: spills and shared memory are judged")
        worse = [line for built in builts for line in regressions(built, nearest.get(built.name))]
        print("\n".join([f"{len(worse)} numbers are worse than with Triton {newest}:", *worse]))
    else:
        wrong += [fault for built in builts for fault in regressions(built, bounds.get(built.name))]
        lacking = sum(row.keys() < set(COLUMNS) for row in bounds.values())
        if lacking:
            print(f"{lacking} launches have no bound in some column: --all --update records all")
    architectures = ", ".join(f"sm_{capability}" for capability in CAPABILITIES)
    print(
        "\n".join(wrong)
        or f"{len(chosen)} kernels for {architectures}, {len(builts)} of them compiled now: all hold"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
