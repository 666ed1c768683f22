"""Peak memory of a call, including its results.

On a GPU the allocator counts. On Linux the kernel does: reset the high-water mark of resident memory
(/proc/self/clear_refs), make the call, read the mark. The heap is trimmed before.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_PROC = Path("/proc/self")


def peak_bytes(call: Callable[[], Any], device: str) -> int | None:
    """Return the peak, or None if it cannot be measured. Warm up `call` before."""
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
