"""Check in PTX that no product was fused unrounded where its rounding matters.

After fusing, b*c - round(b*c) is the rounding error instead of 0, and a thread keeps a product with another
rounding than it passes on. The interpreter never fuses.
"""

from __future__ import annotations

import re
import sys

from tests.kernels.offline import offline_cases
from tests.kernels.offline.offline_code import compiled_of
from tests.kernels.offline.offline_launches import Launch, launches_of


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


def main() -> int:
    chosen: dict[tuple[str, str], Launch] = {}
    for launch in launches_of(offline_cases.cases):
        kernel = launch.kernel.rpartition(":")[2]
        if kernel in KERNELS:
            kind = next((word for word in ("bf16", "fp16", "fp32") if word in launch.name), "")
            chosen.setdefault((kernel, kind), launch)
    wrong = [
        f"{launch.name}: {line}"
        for (kernel, _), launch in chosen.items()
        for line in KERNELS[kernel](compiled_of(launch).asm["ptx"])
    ]
    print("\n".join(wrong) or f"{len(chosen)} kernels: none")
    return 1 if wrong or {kernel for kernel, _ in chosen} != KERNELS.keys() else 0


if __name__ == "__main__":
    sys.exit(main())
