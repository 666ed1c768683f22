"""Run commands in new processes, with one rank or several under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.patience import HANG_SECONDS

ROOT = Path(__file__).resolve().parents[1]


def torchrun(n: int) -> list[str]:
    """Return the command that starts Python in `n` ranks."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)] if n > 1 else []
    return [sys.executable, *launcher]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def on_ranks(n: int, *words: str, timeout: float = HANG_SECONDS) -> subprocess.CompletedProcess[str]:
    """Run `python *words` in `n` ranks from the root of the checkout."""
    return subprocess.run(
        [*torchrun(n), *words],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
