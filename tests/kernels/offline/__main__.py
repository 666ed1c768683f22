"""Compile every Triton kernel as it ships for three GPU generations, without a GPU, and check the code.

    python -m tests.kernels.offline             compile what changed
    python -m tests.kernels.offline --all       compile everything
    python -m tests.kernels.offline --update    compile what changed and record the results as bounds

Launchers get tensors without memory (device "meta"), and their launches are recorded. bounds/<version>.json
holds the bounds for a version of Triton and a digest of each launch's source. Of unchanged launches only one
per kernel is compiled. A spill fails unless the bounds have it as "stack" bytes; edit the file to admit one.
The split kernel spills a few bytes outside of its loops up to Triton 3.7. From 3.8 on it spills more and was
not timed.

In PTX no product may be fused unrounded where its rounding matters: b*c - round(b*c) would be the rounding
error instead of 0, and a thread would keep a product with another rounding than it passes on.
"""

import argparse
import json
import multiprocessing
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import triton

from tests.kernels.offline import offline_cases
from tests.kernels.offline.offline_code import Built, build, compiled_of
from tests.kernels.offline.offline_launches import CAPABILITIES, Launch, launches_of, shipped_kernels

BOUNDS = Path(__file__).with_name("bounds") / f"{triton.__version__}.json"
COLUMNS = ["digest", "stack", "registers", "shared", "instructions", "shuffles", "barriers", "outside"]
FUSION = "enable_fp_fusion"  # off by default from Triton 3.10 on
MAX_SHARED = 163 << 10  # bytes of shared memory per block on sm_80, the least of the three

# Allowed increase over the recorded numbers: absolute, or a factor.
SLACK = {"registers": 8, "shared": 1024}
CODE_SLACK = {"instructions": 1.05, "outside": 1.05}  # shuffles and barriers have none

Bounds = dict[str, dict[str, Any]]


def contracted(ptx: str) -> list[str]:
    """Return the fused multiply-adds whose addend is a rounded and negated product."""
    products = set(re.findall(r"mul(?:\.rn)?\.f32\s+(%\w+)", ptx))
    negated = {new for new, old in re.findall(r"neg\.f32\s+(%\w+), (%\w+)", ptx) if old in products}
    found = re.findall(r"(fma\.rn\.f32\s+%\w+, %\w+, %\w+, (%\w+))", ptx)
    return [line for line, addend in found if addend in negated]


def summed(ptx: str) -> list[str]:
    """Return the fused multiply-adds of a product that is also rounded."""
    products = {frozenset(pair) for pair in re.findall(r"mul(?:\.rn)?\.f64\s+%\w+, (%\w+), (%\w+)", ptx)}
    found = re.findall(r"(fma\.rn\.f64\s+%\w+, (%\w+), (%\w+), %\w+)", ptx)
    return [line for line, *factors in found if frozenset(factors) in products]


KERNELS = {
    "_stream_kernel": contracted,
    "select_kernel": contracted,
    "_runs_kernel": summed,
    "_merge_kernel": summed,
    "_whiten_kernel": summed,
}


def checked_part(launch: Launch) -> tuple[str, str]:
    """Return the kernel and, if it is one of KERNELS, the dtype of its logits."""
    dtypes = ("bf16", "fp16", "fp32") if launch.kernel.rpartition(":")[2] in KERNELS else ()
    return launch.kernel, next((dtype for dtype in dtypes if dtype in launch.name), "")


def faults(built: Built, bounds: Bounds) -> Iterator[str]:
    """Yield unknown spills and too much shared memory."""
    known = bounds.get(built.name, {}).get("stack", 0)
    if built.stack != known or (built.local and not known):
        yield f"{built.name}: spills {built.stack} bytes ({built.local} accesses), expected {known}"
    if built.held["shared"] > MAX_SHARED:
        yield f"{built.name}: {built.held['shared']} bytes of shared memory, expected at most {MAX_SHARED}"


def regressions(built: Built, bounds: Bounds) -> Iterator[str]:
    """Yield the numbers that exceed the recorded ones by more than the slack."""
    recorded = bounds.get(built.name)
    if recorded is None:
        yield f"{built.name}: not recorded, run python -m tests.kernels.offline --update"
        return
    for name, value in built.held.items():
        limit = int(recorded[name] * CODE_SLACK.get(name, 1)) + SLACK.get(name, 0)
        if value > limit:
            yield f"{built.name}: {value} {name}, recorded {recorded[name]}, expected at most {limit}"


def load_bounds() -> Bounds | None:
    """Return the bounds by name of a launch; None if there are none for this Triton."""
    if not BOUNDS.exists():
        return None
    stored = json.loads(BOUNDS.read_text())
    return {name: dict(zip(stored["columns"], row, strict=True)) for name, row in stored["rows"].items()}


def store_bounds(rows: Bounds) -> None:
    lines = [
        f"  {json.dumps(name)}: {json.dumps([row[column] for column in COLUMNS])}"
        for name, row in sorted(rows.items())
    ]
    head = f'{{"columns": {json.dumps(COLUMNS)},\n "rows": {{\n'
    BOUNDS.parent.mkdir(exist_ok=True)
    BOUNDS.write_text(head + ",\n".join(lines) + "\n}}\n")


def to_build(launches: Sequence[Launch], bounds: Bounds) -> list[Launch]:
    """Return the launches whose digest is not the recorded one, and the first of each `checked_part`."""
    first = {checked_part(launch): launch.name for launch in reversed(launches)}
    return [
        launch
        for launch in launches
        if first[checked_part(launch)] == launch.name
        or bounds.get(launch.name, {}).get("digest") != launch.digest
    ]


def examined(launch: Launch) -> tuple[Built, list[str]]:
    """Return the counts of a launch and its wrong instructions, read from Triton's cache."""
    built, find = build(launch), KERNELS.get(launch.kernel.rpartition(":")[2])
    return built, [f"{launch.name}: {line}" for line in find(compiled_of(launch).asm["ptx"])] if find else []


def checked(launches: Sequence[Launch]) -> Iterator[str]:
    """Yield what is wrong before compiling."""
    shipped = shipped_kernels(offline_cases.MODULES)
    unreached = shipped - {launch.kernel for launch in launches}
    unreached |= KERNELS.keys() - {kernel.rpartition(":")[2] for kernel in shipped}
    yield from (f"{name}: no case launches it" for name in sorted(unreached))
    for launch in launches:
        if dict(launch.options).get(FUSION) is not True:
            yield f"{launch.name}: does not ask for {FUSION}"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.offline")
    parser.add_argument("--all", action="store_true", help="also compile unchanged launches")
    parser.add_argument("--update", action="store_true", help="record the results as bounds")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--only", default="", help="only launches whose name contains this")
    parsed = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1 is set, expected a process without it")
    if parsed.update and parsed.only:
        parser.error("--update records all launches, expected no --only")
    launches = launches_of(offline_cases.cases)
    wrong = list(checked(launches))
    bounds = load_bounds()
    chosen = [launch for launch in launches if parsed.only in launch.name]
    wanted = chosen if parsed.all else to_build(chosen, bounds or {})
    wanted = sorted(wanted, key=lambda launch: (launch.capability, launch.kernel))
    with multiprocessing.get_context("fork").Pool(parsed.jobs) as pool:
        results = pool.map(examined, wanted, chunksize=4)
    builts = [built for built, _ in results]
    for built in sorted(builts, key=lambda built: built.name):
        numbers = ", ".join(f"{value} {name}" for name, value in built.held.items())
        print(f"{built.name}: {built.stack} stack, {numbers}")
    wrong += [line for _, lines in results for line in lines]
    wrong += [fault for built in builts for fault in faults(built, bounds or {})]
    if parsed.update and not wrong:
        new = {built.name: {"digest": built.digest, "stack": built.stack, **built.held} for built in builts}
        rows = {**(bounds or {}), **new}
        bounds = {launch.name: rows[launch.name] for launch in launches}
        store_bounds(bounds)
    if bounds is None:
        print(f"no bounds for Triton {triton.__version__}: only spills and shared memory are checked")
    else:
        wrong += [fault for built in builts for fault in regressions(built, bounds)]
    architectures = ", ".join(f"sm_{capability}" for capability in CAPABILITIES)
    summary = f"{len(chosen)} launches for {architectures}, {len(builts)} compiled now: all within bounds"
    print("\n".join(wrong) or summary)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
