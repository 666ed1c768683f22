"""Results do not depend on ranks, micro-batches, packing or activation checkpointing.

Ragged responses, two steps, two updates per step. Compares every loss term, the gradient norm, and the
gradient and change of every parameter: losses alone would not reveal a wrong scale.
"""

import importlib.util

import pytest

from tests.smopd.run.invariance_worker import HYBRID_VARIANTS, VARIANTS, assert_same, run, whole

pytestmark = pytest.mark.slow
PEFT = importlib.util.find_spec("peft") is not None
HERE = [name for name in VARIANTS if PEFT or "lora" not in name]
"""peft is optional."""
UNPACKED = [name for name in HERE if not name.endswith("packed")]
SHARED = [name for name in UNPACKED if not name.endswith("single")]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return run(tmp_path_factory.mktemp("one"), 1, HERE)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run(tmp_path_factory.mktemp("two"), 2, SHARED)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    return run(tmp_path_factory.mktemp("hybrid"), 4, HYBRID_VARIANTS)


@pytest.mark.parametrize("variant", UNPACKED)
def test_layout_changes_nothing(one, variant):
    assert_same(one[variant], one[f"{variant.rpartition('-')[0]}-packed"])


@pytest.mark.parametrize("variant", SHARED)
def test_two_ranks_equal_one_process(one, two, variant):
    assert_same(two[variant], one[variant])


@pytest.mark.parametrize("variant", HYBRID_VARIANTS)
def test_shards_within_replicas_equal_one_process(one, hybrid, variant):
    assert_same(hybrid[variant], one[whole(variant)])


@pytest.mark.parametrize("other", ["weighed-packed", "gated-packed", "reverse-packed"])
def test_the_comparison_can_fail(one, other):
    with pytest.raises(AssertionError):
        assert_same(one[other], one["plain-packed"])
    for update in one["plain-packed"]:
        assert update["terms"][:3].abs().min() > 0
        assert min(change.abs().max() for change in update["changes"].values()) > 1e-5
