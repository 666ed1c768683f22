"""ZeRO-2 and ZeRO-3 on two ranks equal FSDP2 on one: loss terms, gradient norm, gradients, changes."""

import pytest

from tests.smopd.run.invariance_worker import ZERO_VARIANTS, assert_same, run, whole

pytest.importorskip("deepspeed")
pytest.importorskip("peft")


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return run(tmp_path_factory.mktemp("one"), 1, sorted({whole(variant) for variant in ZERO_VARIANTS}))


@pytest.fixture(scope="module")
def zero(tmp_path_factory):
    return run(tmp_path_factory.mktemp("zero"), 2, ZERO_VARIANTS)


@pytest.mark.parametrize("variant", ZERO_VARIANTS)
def test_two_ranks_equal_one_process(one, zero, variant):
    assert_same(zero[variant], one[whole(variant)])
