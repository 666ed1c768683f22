"""Every Triton kernel compiles without spills and within the recorded bounds; needs no GPU.

Runs in a separate process because Triton decides at import whether to interpret.
"""

from pathlib import Path

import pytest

from tests.ranks import python

pytest.importorskip("triton", reason="triton is not installed")


@pytest.mark.slow
def test_everything_that_ships_compiles_and_holds(tmp_path: Path) -> None:
    variables = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = python("-m", "tests.kernels.offline", **variables)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"


ORDERS = """
import os
from smopd.kernels.triton import loss
for names in (("row_kernel", "split_kernel"), ("split_kernel", "row_kernel")):
    if os.fork() == 0:
        print(*[getattr(loss, name).cache_key for name in names], flush=True)
        os._exit(0)
    os.wait()
"""


def test_a_kernels_key_in_the_cache_does_not_depend_on_what_is_asked_first() -> None:
    row, split, *other_order = python("-c", ORDERS, TRITON_INTERPRET="0").stdout.split()
    assert row != split and other_order == [split, row]
