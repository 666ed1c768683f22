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


KEYS = "from smopd.kernels.triton import loss; print(loss.{}.cache_key, loss.{}.cache_key)"


def test_a_kernels_key_in_the_cache_does_not_depend_on_what_is_asked_first() -> None:
    first, second = (
        python("-c", KEYS.format(*names), TRITON_INTERPRET="0").stdout.split()
        for names in (("row_kernel", "split_kernel"), ("split_kernel", "row_kernel"))
    )
    assert len(set(first)) == 2
    assert first == second[::-1]
