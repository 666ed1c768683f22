"""What `make gpu` runs on a CUDA machine, with torch and triton alone: correctness and every benchmark.

First every benchmark's hard shapes against float64, then their speed (a provider that is wrong is refused
before it is timed), then `pytest -m gpu` where pytest is installed. Each benchmark is a process of its own: a
kernel that corrupts its process takes no other's result along. The CUDA library is built where nvcc is, and
left out of what follows where its own check fails. All have budgets; the whole ends in under eight minutes.
"""

from __future__ import annotations

import datetime
import importlib.util
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench import _record
from smopd.kernels import cuda

BUILD_SECONDS, CHECK_SECONDS, TEST_SECONDS = 100, 90, 130
TOTAL_SECONDS = 440
GRACE_SECONDS = 60  # of a case that was begun in time
TESTS = "tests/kernels"
LIBRARY = _record.ROOT / "smopd" / "_C_cuda.abi3.so"
CUDA_BENCHMARK = "smopd_loss"


def main(folder: Path, benchmarks: Sequence[str]) -> int:
    """Writes folder/<device>-<date>.jsonl; the exit status: 1 where something is wrong, 2 without a GPU."""
    if not torch.cuda.is_available():
        print("error: no CUDA device is here, `make gpu` needs one", file=sys.stderr)
        return 2
    started = time.monotonic()
    today = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    output = folder / f"{_record.slug('cuda')}-{today}.jsonl"
    to_file = ("--output", str(output))
    wrong = False
    without: tuple[str, ...] = ()
    if _build_cuda() and _bench([CUDA_BENCHMARK], CHECK_SECONDS, "--check", "--providers", "cuda", *to_file):
        wrong, without = True, ("--without", "cuda")
        _record.note("the cuda backend is wrong, and left out of what follows")
    wrong |= _bench(benchmarks, CHECK_SECONDS, "--check", *without, *to_file)
    left = TOTAL_SECONDS - TEST_SECONDS - (time.monotonic() - started)
    wrong |= _bench(benchmarks, left, *without, *to_file)
    wrong |= _tests()
    _record.note(f"rows are in {output}; python -m bench table {output} shows them")
    if wrong:
        _record.note("something is wrong: see above")
    return int(wrong)


def _build_cuda() -> bool:
    """Whether smopd._C_cuda is in the checkout; built if it is not and can be."""
    if LIBRARY.exists():
        return True
    if torch.cuda.get_device_capability() != cuda.CAPABILITY:
        _record.note(f"the cuda backend is for compute capability {cuda.CAPABILITY}")
        return False
    tools = runpy.run_path(str(_record.ROOT / "csrc" / "cuda" / "nvcc.py"))
    nvcc = tools["find_nvcc"]()
    if nvcc is None or tools["cuda_major"](nvcc) != str(torch.version.cuda).partition(".")[0]:
        _record.note(f"smopd._C_cuda is not built: no nvcc of torch's CUDA {torch.version.cuda} was found")
        return False
    command = tools["library_command"](nvcc, Path(torch.__file__).parent, LIBRARY)
    try:
        subprocess.run(command, cwd=_record.ROOT, check=True, timeout=BUILD_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        LIBRARY.unlink(missing_ok=True)
        _record.note(f"smopd._C_cuda is not built: {error}")
        return False
    return True


def _bench(benchmarks: Sequence[str], seconds: float, *arguments: str) -> bool:
    """Whether something was wrong. Every benchmark has an even share of what the ones before it left."""
    ends, wrong = time.monotonic() + seconds, False
    for i, name in enumerate(benchmarks):
        share = max(0.0, ends - time.monotonic()) / (len(benchmarks) - i)
        options = ["--device", "cuda", "--deadline", f"{share:.0f}", *arguments]
        command = [sys.executable, "-m", "bench", name, *options]
        try:
            wrong |= subprocess.run(command, cwd=_record.ROOT, timeout=share + GRACE_SECONDS).returncode != 0
        except subprocess.TimeoutExpired:
            _record.note(f"{name} did not end {GRACE_SECONDS} s after its {share:.0f} s: it hangs")
            wrong = True
    return wrong


def _tests() -> bool:
    """Whether a test failed. Those that are not begun in time are skipped, and counted."""
    missing = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    if missing:
        _record.note(f"{' and '.join(missing)} not installed: the checks above are all of the correctness")
        return False
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", TESTS]
    environment = os.environ | {"SMOPD_TEST_UNTIL": str(time.time() + TEST_SECONDS - 30)}
    try:
        status = subprocess.run(
            command, cwd=_record.ROOT, env=environment, timeout=TEST_SECONDS + 30
        ).returncode
    except subprocess.TimeoutExpired:
        _record.note(f"{TESTS} did not end in {TEST_SECONDS + 30} s")
        return True
    return status not in (0, 5)  # 5: no test is marked
