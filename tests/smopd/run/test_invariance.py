"""How a batch is cut changes nothing: ranks, micro-batches, packing, checkpointing, head chunks.

Ragged responses, two steps, two updates a batch (one, where a batch is one prompt). Compared are every loss
term, the unclipped gradient norm, every parameter's gradient and its change in every update: losses alone
would not show a wrong scale.
"""

import pytest

from tests.smopd.run.invariance import assert_same, run, variants, whole
from tests.smopd.run.invariance_worker import HYBRID_VARIANTS, VARIANTS

pytestmark = pytest.mark.slow

# a variant and the one that it must equal
SAME = {
    "single": "packed",
    "many-micro-batches": "packed",
    "separate": "packed",
    "checkpointed": "packed",
    "tied-many": "tied-packed",
    "seq-mean-many": "seq-mean-packed",
    "reverse-many": "reverse-packed",
    "gated-many": "gated-packed",
    "product-many": "product-packed",
    "capped-many": "capped-packed",
    "clipped-many": "clipped-packed",
    "one-prompt-many": "one-prompt-packed",
    "lora-many": "lora-packed",
}


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return run(tmp_path_factory.mktemp("one"), 1, VARIANTS)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run(tmp_path_factory.mktemp("two"), 2, VARIANTS)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    return run(tmp_path_factory.mktemp("hybrid"), 4, HYBRID_VARIANTS)


@pytest.mark.parametrize("variant", variants(SAME))
def test_layout_changes_nothing(one, variant):
    assert_same(one[variant], one[SAME[variant]], variant)


@pytest.mark.parametrize("variant", variants(VARIANTS))
def test_two_ranks_equal_one_process(one, two, variant):
    assert_same(two[variant], one[variant], variant)


@pytest.mark.parametrize("variant", variants(HYBRID_VARIANTS))
def test_shards_within_replicas_equal_one_process(one, hybrid, variant):
    assert_same(hybrid[variant], one[whole(variant)])


def test_the_comparison_can_fail(one):
    with pytest.raises(AssertionError):
        assert_same(one["seq-mean-packed"], one["packed"])
    with pytest.raises(AssertionError):
        assert_same(one["capped-packed"], one["packed"])
    with pytest.raises(AssertionError):
        assert_same(one["gated-packed"], one["packed"])
    with pytest.raises(AssertionError):
        assert_same(one["product-packed"], one["packed"])
    with pytest.raises(AssertionError):
        assert_same(one["clipped-packed"], one["packed"])
    for update in one["packed"]:
        assert update["terms"][:3].abs().min() > 0
        assert min(change.abs().max() for change in update["changes"].values()) > 1e-5
