"""What `make gpu` runs on a CUDA machine, with torch and triton alone: correctness, then every benchmark.

Correctness is every benchmark's hard shapes against float64, and `pytest -m gpu` where pytest is installed.
Both parts have a budget, so that the whole ends in under eight minutes.
"""

from __future__ import annotations

import datetime
import importlib.util
import subprocess
import sys
import time
from pathlib import Path

import torch

from bench import _record

TEST_SECONDS = 150
TOTAL_SECONDS = 440
TESTS = "tests/kernels"


def main(folder: Path) -> int:
    """Writes folder/<device>-<date>.jsonl; the exit status: 1 where something is wrong, 2 without a GPU."""
    if not torch.cuda.is_available():
        print("error: no CUDA device is here, `make gpu` needs one", file=sys.stderr)
        return 2
    started = time.monotonic()
    today = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    output = folder / f"{_record.slug('cuda')}-{today}.jsonl"
    wrong = _bench("--check", "--output", str(output)) != 0
    wrong |= _tests() != 0
    if wrong:
        _record.note("something is wrong: no speed is reported")
        return 1
    left = TOTAL_SECONDS - (time.monotonic() - started)
    wrong = _bench("--output", str(output), "--deadline", str(max(0.0, left))) != 0
    _record.note(f"rows are in {output}; python -m bench table {output} shows them")
    return int(wrong)


def _bench(*arguments: str) -> int:
    command = [sys.executable, "-m", "bench", "--all", "--device", "cuda", *arguments]
    return subprocess.run(command, cwd=_record.ROOT).returncode


def _tests() -> int:
    missing = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    if missing:
        _record.note(f"{' and '.join(missing)} not installed: the checks above are all of the correctness")
        return 0
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", TESTS]
    try:
        status = subprocess.run(command, cwd=_record.ROOT, timeout=TEST_SECONDS).returncode
    except subprocess.TimeoutExpired:
        _record.note(f"{TESTS} did not end in {TEST_SECONDS} s")
        return 1
    return 0 if status == 5 else status  # 5: no test is marked
