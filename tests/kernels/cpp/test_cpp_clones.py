"""The C++ kernels' tests on the clones that this CPU's own choice leaves out: AVX2, and plain x86-64."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.cpp import clones
from tests.patience import HANG_SECONDS

FILES = [
    f"tests/kernels/conformance/test_{name}.py"
    for name in ("topk", "mixture", "forward_kl", "loss", "loss_hostile")
]
# Of the suite what C++ serves, but not what has nothing to do with the instruction set.
WORDS = "equals or combination or whole or hostile or every_half or nan or sums or tail or support"
TESTS = f"cpp and not fp64 and ({WORDS})"


def runs(clone: str) -> str | None:
    """Why this CPU or library cannot run them, or None."""
    path = clones.library()
    if path is None:
        return "smopd._C is not built"
    if not any(name.endswith(f".{clone}") for name in clones.symbols(path.read_bytes())):
        return "smopd._C has no clones, or no names"
    if clone == "arch_x86_64_v3" and not re.search(r"\bavx2\b", Path("/proc/cpuinfo").read_text()):
        return "this CPU has no AVX2"
    return None


@pytest.mark.slow
@pytest.mark.parametrize("clone", ["arch_x86_64_v3", "default"])
def test_every_clone_passes_the_kernels_tests(clone: str, tmp_path: Path, repository_root: Path) -> None:
    why_not = runs(clone)
    if why_not is not None:
        pytest.skip(why_not)
    options = ["-q", "-p", "no:cacheprovider", "-k", TESTS, *FILES]
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.cpp.clones", clone, str(tmp_path), *options],
        cwd=repository_root,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed.group(1)) > 150 and "skipped" not in done.stdout


def test_no_other_clone_can_run(tmp_path: Path, repository_root: Path) -> None:
    """Else the test above would prove nothing: here the chosen clone's own first bytes are overwritten."""
    if (why_not := runs("default")) is not None:
        pytest.skip(why_not)
    path = clones.library()
    assert path is not None
    elf, n_functions = clones.with_clone(path.read_bytes(), "default")
    at, broken = clones.symbols(elf), bytearray(elf)
    functions = [name.removesuffix(".resolver") for name in at if name.endswith(".resolver")]
    assert len(functions) == n_functions
    for place in (clones.clones_of(function, at)["default"] for function in functions):
        broken[place : place + 2] = clones.ILLEGAL
    copy = tmp_path / path.name
    copy.write_bytes(bytes(broken))
    code = (
        "import torch\n"
        f"torch.ops.load_library({str(copy)!r})\n"
        "torch.ops.smopd.topk_logprobs_cpu(torch.randn(2, 50), 4, None, 1.0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=repository_root, capture_output=True)
    assert done.returncode == -4  # SIGILL
