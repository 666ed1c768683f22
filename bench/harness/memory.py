"""Peak memory of one call above what was there before it, its results included.

On a GPU the allocator's own count. On Linux's CPUs the kernel's: the high-water mark of resident memory is
reset (/proc/self/clear_refs), the call made, the mark read. Freed heap memory is handed back before, so that
reusing it counts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_PROC = Path("/proc/self")


def peak_bytes(call: Callable[[], Any], device: str) -> int | None:
    """None where it cannot be measured. Call it once before, or what a first call sets up is counted."""
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = call()
        torch.cuda.synchronize()
        del result
        return torch.cuda.max_memory_allocated() - before
    if not _reset_mark():
        return None
    before = _status("VmRSS")
    result = call()
    peak = _status("VmHWM")
    del result
    return max(0, peak - before)


def _reset_mark() -> bool:
    try:
        ctypes.CDLL(None).malloc_trim(0)
        (_PROC / "clear_refs").write_text("5")
    except (OSError, AttributeError):
        return False
    return True


def _status(name: str) -> int:
    for line in (_PROC / "status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    return 0
