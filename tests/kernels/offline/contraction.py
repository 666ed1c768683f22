"""Check in PTX that no product was fused unrounded where its rounding matters.

After fusing, b*c - round(b*c) is the rounding error instead of 0, and a thread keeps a product with another
rounding than it passes on. The interpreter never fuses.
"""

from __future__ import annotations

import re

from tests.kernels.offline.offline_code import compiled_of
from tests.kernels.offline.offline_launches import Launch


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


def unrounded(launch: Launch) -> list[str]:
    """Return the wrong instructions of a launch; after a first compilation it is read from Triton's cache."""
    find = KERNELS.get(launch.kernel.rpartition(":")[2])
    return [f"{launch.name}: {line}" for line in find(compiled_of(launch).asm["ptx"])] if find else []
