"""Every Triton kernel as it ships compiles without spills and is no worse than recorded; no GPU is needed.

The gate itself is a process of its own (offline.py), because Triton decides at import whether it interprets.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")


from tests.patience import HANG_SECONDS


@pytest.mark.slow
def test_everything_that_ships_compiles_and_holds(repository_root, tmp_path) -> None:
    assert_well("tests.kernels.offline", repository_root, tmp_path)


@pytest.mark.slow
def test_no_offset_is_subtracted_unrounded(repository_root, tmp_path) -> None:
    assert_well("tests.kernels.offline.contraction", repository_root, tmp_path)


def assert_well(module: str, folder: Path, cache: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", module]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS
    )
    print(done.stdout)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
