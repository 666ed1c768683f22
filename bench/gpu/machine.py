"""What the machine is and can do: versions, nvidia-smi, its cache; copies, reads, matrix products.

python -m bench.gpu.machine --output FILE
"""

from __future__ import annotations

import argparse
import importlib.metadata
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch

from bench.harness import ceiling, record
from bench.harness.timing import Turn, clock_for, interleaved

N, V, DTYPE = 8192, 151_936, torch.bfloat16
HIDDEN = (1536, 2048, 3584)
SECONDS = 3.0
SMI_SECONDS = 15.0
PACKAGES = ("torch", "triton", "numpy", "pytest", "pytest-xdist", "hypothesis", "liger-kernel", "trl")
ASKED = "name,driver_version,memory.total,memory.used,clocks.sm,clocks.mem,clocks.max.sm,power.limit,pstate"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.machine", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="rows go to this file")
    with parser.parse_args().output.open("a") as file:
        tell = record.teller("cuda", file)
        tell({"benchmark": "machine", "case": "", "kind": "machine"} | facts())
        torch.manual_seed(0)
        ceilings("bandwidth", f"N{N}-V{V}-bf16", _bandwidth(), tell)
        for width in HIDDEN:
            ceilings("gemm", f"N{N}-V{V}-D{width}-bf16", _product(width), tell)


def facts() -> dict:
    properties = torch.cuda.get_device_properties(0)
    return {
        "smi": _smi(),
        "processors": properties.multi_processor_count,
        "l2_mib": getattr(properties, "L2_cache_size", 0) / 2**20,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
    }


def _smi() -> dict[str, str]:
    """Empty where the tool is not there, or does not answer."""
    command = ["nvidia-smi", f"--query-gpu={ASKED}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(ASKED.split(","), done.stdout.strip().split(", "), strict=False))


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _bandwidth() -> list[ceiling.Ceiling]:
    logits_NV = torch.randn(N, V, dtype=DTYPE, device="cuda")
    return [ceiling.copy(logits_NV), ceiling.read(logits_NV)]


def _product(width: int) -> list[ceiling.Ceiling]:
    hidden_ND = torch.randn(N, width, dtype=DTYPE, device="cuda")
    weight_VD = torch.randn(V, width, dtype=DTYPE, device="cuda")
    return [ceiling.gemm(hidden_ND, weight_VD), ceiling.three_gemms(hidden_ND, weight_VD)]


def ceilings(name: str, case: str, found: list[ceiling.Ceiling], tell: Callable[[dict], None]) -> None:
    """A row for each, timed in turns."""
    turns = {one.name: Turn(run=lambda _, run=one.run: run()) for one in found}
    times = interleaved(turns, clock_for("cuda"), SECONDS / len(found))
    for one in found:
        low, median, high = (float(f"{value * 1e3:.4g}") for value in times[one.name].quantiles())
        row = {"benchmark": name, "case": case, "provider": one.name, "kind": "ceiling"}
        row |= {"ms": median, "p20_ms": low, "p80_ms": high}
        if one.bytes:
            row["gb_per_s"] = round(one.bytes / median / 1e6, 1)
        if one.flops:
            row["gflop_per_s"] = round(one.flops / median / 1e6, 1)
        tell(row)


if __name__ == "__main__":
    main()
