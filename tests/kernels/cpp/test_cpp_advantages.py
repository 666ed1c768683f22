"""The C++ GRPO, GDPO and GD2PO advantages against the reference, which computes in float64 too.

Their definition is held to loops in Python by test_ops_advantages.py, on both backends.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from smopd.kernels import cpp
from smopd.kernels.reference import advantages as reference_advantages
from tests.kernels.cpp import cpp_rows

cpp_rows.need_extension()
pytestmark = pytest.mark.usefixtures("poisoned_memory")

NAN, INF = math.nan, math.inf
WHITENINGS = ("responses", "tokens", None)
ONE_GROUP = torch.zeros(4, dtype=torch.int64)


def check(op: str, rewards_RK: Tensor, group_R: Tensor, **options) -> tuple[Tensor, ...]:
    """float64 on both sides: what is left is the rounding of the result, and the order of the sums.

    Where all advantages are equal, whitening divides the rounding of their mean by norm_eps.
    """
    got, want = (
        getattr(module, op)(rewards_RK, group_R, **options) for module in (cpp, reference_advantages)
    )
    got, want = (x if isinstance(x, tuple) else (x,) for x in (got, want))
    rtol, atol = 1e-10 if rewards_RK.dtype == torch.float64 else 1e-6, 1e-9
    assert [x.dtype for x in got] == [y.dtype for y in want]
    torch.testing.assert_close(got[0], want[0], rtol=rtol, atol=atol, equal_nan=True)
    assert all(torch.equal(x, y) for x, y in zip(got[1:], want[1:], strict=True))
    return got


def check_all(rewards_RK: Tensor, group_R: Tensor, lengths_R: Tensor | None = None, **options) -> None:
    lengths_R = torch.arange(len(group_R)) % 7 + 1 if lengths_R is None else lengths_R
    check("grpo_advantages", rewards_RK, group_R, **options)
    for whiten in WHITENINGS:
        both = {**options, "lengths_R": lengths_R, "whiten": whiten}
        check("gdpo_advantages", rewards_RK, group_R, **both)
        for snr in (None, 0.2, 0.8):
            check("gd2po_advantages", rewards_RK, group_R, **both, snr_threshold=snr)


def ragged(seed: int, n_responses: int = 70, n_rewards: int = 3, n_groups: int = 19):
    """Groups in shuffled order, the last reward sparse, some not to be scored."""
    gen = torch.Generator().manual_seed(seed)
    ids = torch.randint(-(2**62), 2**62, (n_groups,), generator=gen)
    group_R = ids[torch.randint(0, n_groups, (n_responses,), generator=gen)]
    rewards_RK = torch.randn(n_responses, n_rewards, generator=gen, dtype=torch.float64)
    rewards_RK[:, -1] = (rewards_RK[:, -1] > 1).double()
    rewards_RK[torch.rand(rewards_RK.shape, generator=gen) < 0.1] = NAN
    lengths_R = torch.randint(0, 50, (n_responses,), generator=gen)
    return rewards_RK, group_R, torch.randn(n_rewards, generator=gen), lengths_R


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("n_rewards", [1, 2, 3, 4, 5, 8, 17])
@pytest.mark.parametrize("norm_eps", [1e-6, 0.0, 1e-4])
def test_equals_the_reference(n_rewards: int, norm_eps: float, dtype: torch.dtype) -> None:
    rewards_RK, group_R, weights_K, lengths_R = ragged(n_rewards, n_rewards=n_rewards)
    for weights in (None, weights_K):
        options = {"weights_K": weights, "norm_eps": norm_eps}
        check_all(rewards_RK.to(dtype), group_R, lengths_R, **options)


@pytest.mark.parametrize("n_groups", [1, 40, 500])
def test_groups_of_any_size_and_order(n_groups: int) -> None:
    rewards_RK, group_R, weights_K, lengths_R = ragged(n_groups, 1000, 3, n_groups)
    for order_R in (group_R, group_R.sort().values, group_R.sort(descending=True).values):
        check_all(rewards_RK.float(), order_R, lengths_R, weights_K=weights_K)
    check_all(rewards_RK, torch.arange(1000) << 32, lengths_R)  # groups of one


def test_group_numbers_at_the_ends_of_int64() -> None:
    group_R = torch.tensor([-(2**63), 2**63 - 1, 0, -1, -(2**63), 0, 2**63 - 1, -1])
    check_all(torch.randn(8, 2, dtype=torch.float64), group_R)


def test_strides_and_the_types_of_weights_and_lengths() -> None:
    rewards_RK, group_R, weights_K, lengths_R = ragged(4)
    plain = check("gd2po_advantages", rewards_RK, group_R, weights_K=weights_K, lengths_R=lengths_R)
    strided = (rewards_RK.T.contiguous().T, group_R.repeat_interleave(2)[::2])
    for weights, lengths in itertools.product(
        (weights_K.double(), weights_K.repeat_interleave(3)[::3]),
        (lengths_R.int(), lengths_R.float(), lengths_R.repeat_interleave(2)[::2], lengths_R.bfloat16()),
    ):
        other = cpp.gd2po_advantages(*strided, weights_K=weights, lengths_R=lengths)
        assert all(torch.equal(x, y) for x, y in zip(plain, other, strict=True))
    check_all(rewards_RK[:1].expand(70, 3), group_R)


@pytest.mark.parametrize("group_size", [2, 3, 7, 8, 16])
def test_equal_rewards_add_exactly_nothing(group_size: int) -> None:
    some = 1.0 + 1e3 * torch.rand(300, generator=torch.Generator().manual_seed(group_size))
    values = torch.cat([torch.arange(1, 176) / 175, torch.arange(1, 176) * 0.1, some])
    equal_R = values.float().repeat_interleave(group_size)
    group_R = torch.arange(len(values)).repeat_interleave(group_size)
    up_R = torch.nextafter(equal_R, torch.tensor(INF))
    for rewards_R in (equal_R, torch.where(torch.arange(len(equal_R)) % 2 == 0, equal_R, up_R)):
        assert not bool(cpp.grpo_advantages(rewards_R[:, None], group_R).any())
        assert not bool(cpp.gdpo_advantages(rewards_R[:, None], group_R).any())
        both = torch.stack([rewards_R, torch.arange(len(equal_R)).float() % group_size], 1)
        adv_R = cpp.gdpo_advantages(both, group_R, whiten=None)
        assert torch.equal(adv_R, cpp.gdpo_advantages(both[:, 1:], group_R, whiten=None))
        assert bool(cpp.gd2po_advantages(both, group_R, whiten=None)[1].all())
    assert bool(
        cpp.gdpo_advantages(
            torch.stack([equal_R, up_R]).double().T.reshape(-1, 1), group_R.repeat_interleave(2), whiten=None
        ).any()
    )


def test_sums_that_cancel_and_weights_of_zero() -> None:
    cancel_RK = torch.tensor([[0.1, 0.2, -0.3], [0.3, -0.2, -0.1], [0.0, 0.0, 0.0], [-0.3, 0.1, 0.2]])
    assert not bool(cpp.grpo_advantages(cancel_RK, ONE_GROUP).any())
    rewards_RK = torch.tensor([[1.0, NAN], [2.0, 5.0], [4.0, INF], [8.0, -INF]])
    for weights in ((1.0, 0.0), (0.0, 1.0), (0.0, 0.0), (-1.0, 2.0), (INF, 1.0), (NAN, 1.0)):
        check_all(rewards_RK, ONE_GROUP, weights_K=torch.tensor(weights))
    alone = cpp.grpo_advantages(rewards_RK[:, :1], ONE_GROUP)
    assert torch.equal(cpp.grpo_advantages(rewards_RK, ONE_GROUP, weights_K=torch.tensor([1.0, 0.0])), alone)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("value", [NAN, INF, -INF, 0.0, 1e-310, 1e30, 1e200], ids=str)
def test_hostile_values(value: float, dtype: torch.dtype) -> None:
    rewards_RK, group_R, weights_K, lengths_R = ragged(3)
    for places in (slice(2, 3), slice(None, None, 2), slice(None)):
        rewards = rewards_RK.clone()
        rewards[places, 1] = value
        check_all(rewards.to(dtype), group_R, lengths_R, weights_K=weights_K)
    rewards_RK[::2, 0], rewards_RK[1::2, 0] = value, -value
    check_all(rewards_RK.to(dtype), group_R, lengths_R)


@pytest.mark.parametrize("bad", [0.0, -3.0, NAN, INF])
def test_hostile_lengths(bad: float) -> None:
    rewards_RK, group_R, _, lengths_R = ragged(6)
    for places in (slice(1, 2), slice(None)):
        lengths = lengths_R.double()
        lengths[places] = bad
        check_all(rewards_RK, group_R, lengths)


def test_nothing_or_one_token_is_kept() -> None:
    group_R = torch.zeros(2, dtype=torch.int64)
    adv_R, kept_R = cpp.gd2po_advantages(
        torch.tensor([[1.0, -1.0], [-1.0, 1.0]]), group_R, lengths_R=torch.tensor([5, 6])
    )
    assert not bool(kept_R.any()) and torch.equal(adv_R, torch.zeros(2))
    rewards_RK = torch.tensor([[1.0, 1.0], [-2.0, 1.0], [1.0, -2.0]])
    for lengths in ([1, 9, 9], [2, 9, 9], [0, 9, 9]):
        check_all(rewards_RK, torch.zeros(3, dtype=torch.int64), torch.tensor(lengths))
    adv_R, _ = cpp.gd2po_advantages(rewards_RK, ONE_GROUP[:3], lengths_R=torch.tensor([1, 9, 9]))
    assert torch.equal(adv_R, torch.zeros(3))


@pytest.mark.parametrize("shape", [(0, 2), (0, 0), (3, 0), (1, 1), (1, 5)], ids=str)
def test_empty_and_single(shape: tuple[int, int]) -> None:
    check_all(torch.randn(shape), torch.zeros(shape[0], dtype=torch.int64))


@st.composite
def batches(draw):
    """Up to five groups, rewards that repeat, conflict, differ by rounding or cannot be scored."""
    n_responses, n_rewards = draw(st.integers(1, 12)), draw(st.integers(1, 5))

    def drawn(strategy: st.SearchStrategy, count: int) -> Tensor:
        return torch.tensor(draw(st.lists(strategy, min_size=count, max_size=count)))

    value = st.sampled_from([0.0, 1.0, 1.0 + 2.0**-23, -1.0, 0.1, 0.7, 3.0, NAN, 1e-30, 1e30, INF, -INF])
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
    rewards_RK = drawn(value, n_responses * n_rewards).reshape(n_responses, n_rewards).to(dtype)
    weights_K = drawn(st.sampled_from([0.0, 0.25, 1.0, -0.5]), n_rewards)
    group_R = drawn(st.integers(-2, 2), n_responses) * (2**61)
    return rewards_RK, group_R, weights_K, drawn(st.integers(0, 9), n_responses)


@settings(max_examples=100, deadline=None)
@given(batches())
def test_any_batch(batch) -> None:
    rewards_RK, group_R, weights_K, lengths_R = batch
    check_all(rewards_RK, group_R, lengths_R, weights_K=weights_K)


def test_result_does_not_depend_on_threads() -> None:
    rewards_RK, group_R, weights_K, lengths_R = ragged(7, 40_000, 5, 3000)
    options = {"weights_K": weights_K, "lengths_R": lengths_R}
    threads = torch.get_num_threads()
    results = []
    try:
        for n_threads in (1, 2):
            torch.set_num_threads(n_threads)
            for rewards in (rewards_RK, rewards_RK.float()):
                results.append(cpp.grpo_advantages(rewards, group_R, weights_K=weights_K))
                results.append(cpp.gdpo_advantages(rewards, group_R, **options))
                results += cpp.gd2po_advantages(rewards, group_R, **options)
    finally:
        torch.set_num_threads(threads)
    alone, both = results[: len(results) // 2], results[len(results) // 2 :]
    assert all(torch.equal(x, y) for x, y in zip(alone, both, strict=True))


def test_arguments_of_the_operator_are_checked() -> None:
    rewards, group = torch.zeros(4, 2), ONE_GROUP
    rest = (False, True, None, 1, 1e-6, False)
    for arguments, message in (
        ((rewards[0], group, None, None), "rewards has to be a CPU tensor"),
        ((rewards.int(), group, None, None), "rewards is not float64"),
        ((rewards, group[1:], None, None), "group has to be a CPU tensor"),
        ((rewards, group.int(), None, None), "group is not int64"),
        ((rewards, group, torch.ones(3).double(), None), "weights has to be a CPU tensor"),
        ((rewards, group, torch.ones(2), None), "weights is not float64"),
        ((rewards, group, None, group), "lengths is not float64"),
    ):
        with pytest.raises(RuntimeError, match=f"advantages_cpu: {message}"):
            torch.ops.smopd.advantages_cpu(*arguments, *rest)
