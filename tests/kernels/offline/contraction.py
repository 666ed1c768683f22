"""Looks in PTX for products that the compiler drew, unrounded, into where their rounding counts.

In a difference b*c - round(b*c) is then what the rounding lost, not 0; in a sum over threads each rounds the
product that it hands on and not the one that it keeps. The interpreter never does.
"""

from __future__ import annotations

import re
import sys

from tests.kernels.offline import offline_cases
from tests.kernels.offline.offline_code import compiled_of
from tests.kernels.offline.offline_launches import Launch, launches_of


def contracted(ptx: str) -> list[str]:
    """The fused multiply-adds whose addend is a product, rounded and negated."""
    products = set(re.findall(r"mul(?:\.rn)?\.f32\s+(%\w+)", ptx))
    negated = {new for new, old in re.findall(r"neg\.f32\s+(%\w+), (%\w+)", ptx) if old in products}
    found = re.findall(r"(fma\.rn\.f32\s+%\w+, %\w+, %\w+, (%\w+))", ptx)
    return [line for line, addend in found if addend in negated]


def summed(ptx: str) -> list[str]:
    """The fused multiply-adds of a product that is rounded as well."""
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
