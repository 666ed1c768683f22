"""The linear loss's peak memory above its inputs, measured in a process of its own, against eager's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import HANG_SECONDS

N, V, D = 1024, 32_000, 64
LOGITS, CHUNK = 4 * N * V, 8 << 20
WEIGHT = 4 * V * D

pytestmark = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc/self/clear_refs"
)


@pytest.fixture(scope="module")
def measured(repository_root: Path) -> dict[str, dict]:
    results = {}
    for form in ("eager", "rows", "recompute"):
        sizes = [str(size) for size in (N, V, D)]
        command = [sys.executable, "-m", "tests.kernels.head.memory_worker", form, *sizes]
        command += ["--chunk-bytes", str(CHUNK)]
        options = {"cwd": repository_root, "capture_output": True, "text": True, "timeout": HANG_SECONDS}
        done = subprocess.run(command, **options)
        assert done.returncode == 0, done.stderr
        results[form] = json.loads(done.stdout)
    return results


def test_all_compute_the_same(measured) -> None:
    losses = [result["loss"] for result in measured.values()]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


def test_eager_holds_the_logits_several_times(measured) -> None:
    assert measured["eager"]["bytes"] > 2 * LOGITS  # else the measurement is broken


@pytest.mark.parametrize("form", ["rows", "recompute"])
def test_peak_is_a_chunk_and_the_gradients(form: str, measured) -> None:
    """The weight's gradient stands once, and the rows' work takes little; less than a sixth of eager's."""
    assert measured[form]["bytes"] < CHUNK + WEIGHT + (32 << 20)
    assert 6 * measured[form]["bytes"] < measured["eager"]["bytes"]
