"""Peak memory of a call, including its results.

On a GPU, torch's allocator measures it. On a CPU, Linux does: the heap is trimmed, the high-water mark of
resident memory is reset (/proc/self/clear_refs), and the mark is read after the call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_PROC = Path("/proc/self")


def peak_bytes(call: Callable[[], Any], device: str) -> int | None:
    """Return how many bytes `call` adds at its peak, or None if unknown. Warm up `call` first."""
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
