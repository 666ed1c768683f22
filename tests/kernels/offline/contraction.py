"""Looks for a product less its own rounding in the PTX of the kernels that subtract exponents' offsets.

    python -m tests.kernels.offline.contraction

The compiler may draw a product into a difference: b*c - round(b*c) is then what the rounding lost and not 0.
The interpreter never does. A process of its own, without TRITON_INTERPRET: Triton decides at import.
"""

from __future__ import annotations

import re
import sys

from triton.runtime import driver

from tests.kernels.offline import offline_cases
from tests.kernels.offline.offline_code import StubDriver, _mocked
from tests.kernels.offline.offline_launches import Launch, kernel_of, launches_of

KERNELS, CAPABILITY = ("_stream_kernel", "select_kernel"), 90


def ptx_of(launch: Launch) -> str:
    driver.set_active(StubDriver(launch.capability))
    kernel = kernel_of(launch)
    kernel.device_caches.clear()
    options = {name: _mocked(value) for name, value in launch.options}
    return kernel.run(*map(_mocked, launch.arguments), grid=(1,), warmup=True, **options).asm["ptx"]


def contracted(ptx: str) -> list[str]:
    """The fused multiply-adds whose addend is a product, rounded and negated."""
    products = set(re.findall(r"mul(?:\.rn)?\.f32\s+(%\w+)", ptx))
    negated = {new for new, old in re.findall(r"neg\.f32\s+(%\w+), (%\w+)", ptx) if old in products}
    found = re.findall(r"(fma\.rn\.f32\s+%\w+, %\w+, %\w+, (%\w+))", ptx)
    return [line for line, addend in found if addend in negated]


def main() -> int:
    chosen: dict[tuple[str, str], Launch] = {}
    for launch in launches_of(offline_cases.cases):
        kernel = launch.kernel.rpartition(":")[2]
        if launch.capability == CAPABILITY and kernel in KERNELS:
            chosen.setdefault((kernel, next(w for w in ("bf16", "fp16", "fp32") if w in launch.name)), launch)
    wrong = [f"{launch.name}: {line}" for launch in chosen.values() for line in contracted(ptx_of(launch))]
    print("\n".join(wrong) or f"{len(chosen)} kernels: none")
    return 1 if wrong or len(chosen) < len(KERNELS) else 0


if __name__ == "__main__":
    sys.exit(main())
