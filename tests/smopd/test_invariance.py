"""How a batch is cut changes nothing: ranks, strategies, micro-batches, packing, checkpointing, head chunks.

Ragged responses, three steps, two updates a batch (one, where a batch is one prompt). Compared are every loss
term, the unclipped gradient norm, every parameter's gradient and its change in every update: losses alone
would not show a wrong scale.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.smopd.invariance_worker import HYBRID_VARIANTS, STEPS, VARIANTS, ZERO_VARIANTS

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
    "capped-many": "capped-packed",
    "clipped-many": "clipped-packed",
    "one-prompt-many": "one-prompt-packed",
    "lora-many": "lora-packed",
}


def packages(variant: str) -> list:
    """Skips a variant whose package is not installed."""
    needed = ["peft"] * ("lora" in variant) + ["deepspeed"] * variant.startswith("zero")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    return [pytest.mark.skip(reason=f"needs {', '.join(missing)}")] if missing else []


def variants(names) -> list:
    return [pytest.param(name, marks=packages(name)) for name in names]


def whole(variant: str) -> str:
    """What a variant of another strategy must equal in one process under FSDP2."""
    kind = next((kind for kind in ("lora", "tied", "checkpointed") if kind in variant), "")
    return {"": "packed", "lora": "lora-packed"}.get(kind, "tied-packed")


def run(folder: Path, ranks: int, names) -> dict[str, list[dict]]:
    worker = str(ROOT / "tests/smopd/invariance_worker.py")
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    names = [name for name in names if not packages(name)]
    command = [sys.executable, *launcher, worker, str(folder), *names]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(folder / "results.pt")


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return run(tmp_path_factory.mktemp("one"), 1, VARIANTS)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run(tmp_path_factory.mktemp("two"), 2, VARIANTS)


@pytest.fixture(scope="module")
def zero(tmp_path_factory):
    return run(tmp_path_factory.mktemp("zero"), 2, ZERO_VARIANTS)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    return run(tmp_path_factory.mktemp("hybrid"), 4, HYBRID_VARIANTS)


def assert_same(found: list[dict], expected: list[dict], variant: str = "packed") -> None:
    updates = STEPS if variant.startswith("one-prompt") else STEPS * 2
    assert len(found) == len(expected) == updates
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(a["terms"], b["terms"], rtol=RELATIVE, atol=1e-6)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=RELATIVE)
        for kind in ("gradients", "changes"):
            assert a[kind].keys() == b[kind].keys()
            for name, value in b[kind].items():  # an adapter's A has no gradient while its B is 0
                error = (a[kind][name] - value).norm() / value.norm().clamp(min=1e-30)
                assert error < RELATIVE, f"update {i}: {kind} of {name} differ by {error:.1e}"


@pytest.mark.parametrize("variant", variants(SAME))
def test_layout_changes_nothing(one, variant):
    assert_same(one[variant], one[SAME[variant]], variant)


@pytest.mark.parametrize("variant", variants(VARIANTS))
def test_two_ranks_equal_one_process(one, two, variant):
    assert_same(two[variant], one[variant], variant)


@pytest.mark.parametrize("variant", variants(ZERO_VARIANTS))
def test_deepspeed_on_two_ranks_equals_one_process(one, zero, variant):
    assert_same(zero[variant], one[whole(variant)])


@pytest.mark.parametrize("variant", variants(HYBRID_VARIANTS))
def test_shards_within_replicas_equal_one_process(one, hybrid, variant):
    assert_same(hybrid[variant], one[whole(variant)])


def test_the_comparison_can_fail(one):
    with pytest.raises(AssertionError):
        assert_same(one["seq-mean-packed"], one["packed"])
    with pytest.raises(AssertionError):
        assert_same(one["capped-packed"], one["packed"])
    with pytest.raises(AssertionError):
        assert_same(one["clipped-packed"], one["packed"])
    for update in one["packed"]:
        assert update["terms"][:3].abs().min() > 0
        assert min(change.abs().max() for change in update["changes"].values()) > 1e-5
