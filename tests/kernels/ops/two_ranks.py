"""Runs cases in two gloo processes, for the tests of what goes over ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.patience import HANG_SECONDS

ROOT = Path(__file__).resolve().parents[3]


def run(cases: list[tuple[str, dict, dict]], folder: Path) -> list[list[Any]]:
    """cases: (kind, inputs, options), see ops_worker.py. For each rank the list of its results."""
    torch.save(cases, folder / "cases.pt")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.kernels.ops.ops_worker", str(folder)]
    workers = [
        subprocess.Popen([*command, str(rank)], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        errors = [worker.communicate(timeout=HANG_SECONDS)[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(errors)
    return [torch.load(folder / f"out{rank}.pt", weights_only=False) for rank in range(2)]
