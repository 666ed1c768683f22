"""torch.profiler's trace of one call of smopd_loss: what is launched around the row kernel, and how long.

python -m bench.gpu.trace --output FILE --trace FILE.json.gz
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from bench.gpu.calls import IN_PLACE, PAPER, Call
from bench.harness import record

CALL = Call("smopd_loss", f"{PAPER}-merge-tail", IN_PLACE)
WARM = 2
SHOWN = 40


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.trace", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="the row goes to this file")
    parser.add_argument("--trace", type=Path, required=True, help="for chrome://tracing or Perfetto")
    parsed = parser.parse_args()
    turn = CALL.turn()
    with turn.context():
        for _ in range(WARM):
            turn.run(turn.prepare())
        prepared = turn.prepare()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            turn.run(prepared)
            torch.cuda.synchronize()
    profiled.export_chrome_trace(str(parsed.trace))
    print(profiled.key_averages().table(sort_by="self_device_time_total", row_limit=SHOWN), flush=True)
    launched = [
        (event.name, event.time_range.elapsed_us())
        for event in profiled.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    row = {"benchmark": CALL.benchmark, "case": CALL.case, "provider": f"trace of {CALL.provider}"}
    with parsed.output.open("a") as file:
        record.teller("cuda", file)(row | {"kind": "trace"} | summary(launched))


def summary(launched: Iterable[tuple[str, float]]) -> dict:
    """Launches of each name with the microseconds that they take on the device, the longest first."""
    by_name: dict[str, list[float]] = defaultdict(list)
    for name, microseconds in launched:
        by_name[name].append(microseconds)
    longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))
    return {
        "launches": sum(map(len, by_name.values())),
        "kernels": [[name[:80], len(times), round(sum(times), 1)] for name, times in longest],
    }


if __name__ == "__main__":
    main()
