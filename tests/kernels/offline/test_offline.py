"""Every Triton kernel compiles without spills and within the recorded bounds; needs no GPU.

Runs in a separate process because Triton decides at import whether to interpret.
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
def test_everything_that_ships_compiles_and_holds(repository_root: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.kernels.offline"]
    done = subprocess.run(
        command, cwd=repository_root, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"


KEYS = "from smopd.kernels.triton import loss; print(loss.{}.cache_key, loss.{}.cache_key)"


def test_a_kernels_key_in_the_cache_does_not_depend_on_what_is_asked_first() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    first, second = (
        subprocess.run(
            [sys.executable, "-c", KEYS.format(*names)], env=environment, capture_output=True, text=True
        ).stdout.split()
        for names in (("row_kernel", "split_kernel"), ("split_kernel", "row_kernel"))
    )
    assert len(set(first)) == 2
    assert first == second[::-1]
