"""What the hardware counts in one launch of a kernel, by NVIDIA's ncu: bytes, hits, issue slots, stalls.

    python -m bench.gpu.counters "row kernel, paper" --output FILE

The clocks are left as they are. ncu runs the launch several times, and puts back what it wrote in between.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path

from bench.gpu.calls import IN_PLACE, PAPER, Call
from bench.gpu.plan import tool
from bench.harness import record

SECONDS = 25.0  # of one run of ncu; there are two where it does not know a metric
WATCHED = {
    "row kernel, paper": ("row_kernel", Call("smopd_loss", PAPER, IN_PLACE)),
    "row kernel, default settings": ("row_kernel", Call("smopd_loss", f"{PAPER}-merge-tail", IN_PLACE)),
    "top-kappa stream": ("_stream_kernel", Call("topk_logprobs", "N8192-V151936-kappa64-bf16")),
    "top-kappa select, kappa 64": ("select_kernel", Call("topk_logprobs", "N8192-V151936-kappa64-bf16")),
    "advantages": ("_runs_kernel", Call("advantages", "N16384-K4-G16-fp32")),
}
MEGA, MICRO = 1e-6, 1e-3  # of bytes; of nanoseconds
METRICS = {
    "gpu__time_duration.sum": ("us", MICRO),
    "dram__bytes_read.sum": ("DRAM read MB", MEGA),
    "dram__bytes_write.sum": ("DRAM write MB", MEGA),
    "lts__t_sector_hit_rate.pct": ("L2 hit %", 1.0),
    "smsp__issue_active.avg.pct_of_peak_sustained_active": ("issue active %", 1.0),
}
# The second run leaves these out: a name that a version of ncu does not know ends all of it.
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STALLS = (
    *("long_scoreboard", "short_scoreboard", "barrier", "membar", "wait", "math_pipe_throttle"),
    *("mio_throttle", "lg_throttle", "not_selected", "no_instruction", "dispatch_stall", "drain"),
)
MORE = {"sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active": ("MUFU pipe %", 1.0)}
TOP_STALLS = 3


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.counters", description=__doc__)
    parser.add_argument("name", choices=WATCHED)
    parser.add_argument("--output", type=Path, required=True, help="the row goes to this file")
    parsed = parser.parse_args(arguments)
    kernel, call = WATCHED[parsed.name]
    row = {"benchmark": "counters", "case": parsed.name, "provider": kernel, "kind": "counters"}
    values: dict[str, float] = {}
    for metrics in ([*METRICS, *MORE, *map(STALL.format, STALLS)], list(METRICS)):
        printed = _ncu(kernel, call, metrics)
        print(printed, flush=True)
        if values := parsed_values(printed):
            break
    said = {"counters": named(values)} if values else {"left_out": why_not(printed)}
    with parsed.output.open("a") as file:
        record.teller("cuda", file)(row | said)
    return 0 if values else 1


def command(kernel: str, call: Call, metrics: Sequence[str]) -> list[str]:
    """The first launch of the kernel alone."""
    watch = ["--clock-control", "none", "--kernel-name", f"regex:^{kernel}$", "--launch-count", "1"]
    form = ["--csv", "--page", "raw", "--print-units", "base", "--metrics", ",".join(metrics)]
    return [tool("ncu") or "ncu", *watch, *form, sys.executable, "-m", "bench.gpu.calls", *astuple(call)]


def _ncu(kernel: str, call: Call, metrics: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            command(kernel, call, metrics),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"==ERROR== ncu took more than {SECONDS:.0f} s"
    return done.stdout


def parsed_values(printed: str) -> dict[str, float]:
    """Metric and value of the first launch in ncu's CSV: a column a metric, or with other pages a line."""
    lines = printed.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return {}
    rows = list(csv.DictReader(line for line in lines[start:] if line.startswith('"')))
    if rows and "Metric Name" in rows[0]:
        pairs = [(row["Metric Name"], row["Metric Value"]) for row in rows]
    else:
        pairs = [pair for row in rows if row["ID"] for pair in row.items()][: len(rows[0]) if rows else 0]
    found = {}
    for name, text in pairs:
        try:
            found[name] = float(text.replace(",", ""))
        except (ValueError, AttributeError):
            continue
    return {name: value for name, value in found.items() if "__" in name}


def named(values: dict[str, float]) -> dict[str, float | str]:
    """In units that one reads, with the top stalls: how many warps wait, for each instruction issued."""
    shown: dict[str, float | str] = {
        name: float(f"{values[metric] * unit:.4g}")
        for metric, (name, unit) in (METRICS | MORE).items()
        if metric in values
    }
    stalls = {name: values[STALL.format(name)] for name in STALLS if STALL.format(name) in values}
    top = sorted(stalls, key=lambda name: -stalls[name])[:TOP_STALLS]
    return shown | ({"top stalls": ", ".join(f"{name} {stalls[name]:.2f}" for name in top)} if top else {})


def why_not(printed: str) -> str:
    """ncu's error, or else its last line."""
    lines = [line for line in printed.splitlines() if line.strip()] or ["ncu printed nothing"]
    return next((line for line in lines if "==ERROR==" in line), lines[-1])[:200]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
