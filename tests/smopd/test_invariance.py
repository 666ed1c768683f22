"""How a batch is cut changes nothing: ranks, micro-batches, packing, checkpointing, head chunks.

Ragged responses, two updates a batch, three steps. Compared are every loss term, the unclipped gradient norm,
every parameter's gradient and its change in every update: losses alone would not show a wrong scale.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.smopd.invariance_worker import STEPS

ROOT = Path(__file__).parents[2]
RELATIVE = 1e-4
# a variant and the one that it must equal
SAME = {
    "single": "packed",
    "many-micro-batches": "packed",
    "one-row": "packed",
    "checkpointed": "packed",
    "tied-many": "tied-packed",
    "seq-mean-many": "seq-mean-packed",
    "reverse-many": "reverse-packed",
}


def run(folder: Path, ranks: int) -> dict[str, list[dict]]:
    worker = str(ROOT / "tests/smopd/invariance_worker.py")
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *launcher, worker, str(folder)], env=env, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(folder / "results.pt")


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return run(tmp_path_factory.mktemp("one"), 1)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run(tmp_path_factory.mktemp("two"), 2)


def assert_same(found: list[dict], expected: list[dict]) -> None:
    assert len(found) == len(expected) == STEPS * 2
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(a["terms"], b["terms"], rtol=RELATIVE, atol=1e-6)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=RELATIVE)
        for kind in ("gradients", "changes"):
            for name, value in b[kind].items():
                error = (a[kind][name] - value).norm() / value.norm()
                assert error < RELATIVE, f"update {i}: {kind} of {name} differ by {error:.1e}"


@pytest.mark.parametrize("variant", SAME)
def test_layout_changes_nothing(one, variant):
    assert_same(one[variant], one[SAME[variant]])


@pytest.mark.parametrize("variant", [*SAME, *dict.fromkeys(SAME.values())])
def test_two_ranks_equal_one_process(one, two, variant):
    assert_same(two[variant], one[variant])


def test_the_comparison_can_fail(one):
    with pytest.raises(AssertionError):
        assert_same(one["seq-mean-packed"], one["packed"])
    for update in one["packed"]:
        assert update["terms"][:3].abs().min() > 0
        assert min(change.abs().max() for change in update["changes"].values()) > 1e-5
