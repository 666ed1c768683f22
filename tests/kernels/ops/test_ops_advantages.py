"""GRPO, GDPO and GD2PO advantages: against loops in Python, and the traps of SEMANTICS section 1.

By the reference, which serves a CPU; tests/kernels/triton holds the GPU's kernel to it.
"""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
import torch
from torch import Tensor

from smopd.ops import gd2po_advantages, gdpo_advantages, grpo_advantages


def per_reward(rewards: list[list[float]], groups: list[int], norm_eps: float) -> list[list[float]]:
    out = [[0.0] * len(rewards[0]) for _ in rewards]
    for k in range(len(rewards[0])):
        for group in set(groups):
            rows = [i for i, g in enumerate(groups) if g == group and not math.isnan(rewards[i][k])]
            values = [rewards[i][k] for i in rows]
            if len(values) > 1 and max(values) != min(values):
                for i in rows:
                    spread = statistics.stdev(values) + norm_eps
                    out[i][k] = (rewards[i][k] - statistics.fmean(values)) / spread
    return out


def whitened(adv: list[float], counts: list[float], kind: str, norm_eps: float) -> list[float]:
    n = sum(counts)
    if n <= 1:
        return [0.0] * len(adv)
    mean = sum(c * a for c, a in zip(counts, adv, strict=True)) / n
    var = sum(c * (a - mean) ** 2 for c, a in zip(counts, adv, strict=True)) / (n - 1)
    scale = math.sqrt(var + 1e-8) if kind == "tokens" else math.sqrt(var) + norm_eps
    return [(a - mean) / scale if c > 0 else 0.0 for c, a in zip(counts, adv, strict=True)]


def ragged(seed: int = 0):
    """Groups of 1 to 6 in shuffled order, three rewards of which one is sparse, a few NaN."""
    gen = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 7, (15,), generator=gen)
    group = torch.repeat_interleave(torch.randint(-(10**12), 10**12, (15,), generator=gen), sizes)
    group = group[torch.randperm(len(group), generator=gen)]
    rewards = torch.randn(len(group), 3, generator=gen, dtype=torch.float64)
    rewards[:, 1] = (rewards[:, 1] > 1).double()
    rewards[torch.rand(rewards.shape, generator=gen) < 0.05] = math.nan
    lengths = torch.randint(1, 50, (len(group),), generator=gen)
    return rewards, group, lengths


WEIGHTS = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)


@pytest.mark.parametrize("whiten", ["responses", "tokens", None])
@pytest.mark.parametrize("norm_eps", [1e-6, 0.0, 1e-4])
def test_gdpo_against_a_loop(whiten: str | None, norm_eps: float) -> None:
    rewards, group, lengths = ragged()
    got = gdpo_advantages(
        rewards, group, weights_K=WEIGHTS, lengths_R=lengths, whiten=whiten, norm_eps=norm_eps
    )
    rows = per_reward(rewards.tolist(), group.tolist(), norm_eps)
    want = [sum(w * a for w, a in zip(WEIGHTS.tolist(), row, strict=True)) for row in rows]
    if whiten is not None:
        counts = lengths.tolist() if whiten == "tokens" else [1] * len(want)
        want = whitened(want, counts, whiten, norm_eps)
    assert got.tolist() == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("snr", [None, 0.2, 0.8])
@pytest.mark.parametrize("whiten", ["tokens", "responses", None])
def test_gd2po_against_a_loop(whiten: str | None, snr: float | None) -> None:
    rewards, group, lengths = ragged(1)
    adv, kept = gd2po_advantages(rewards, group, lengths_R=lengths, whiten=whiten, snr_threshold=snr)
    rows, groups = per_reward(rewards.tolist(), group.tolist(), 1e-6), group.tolist()
    want_kept = []
    for row in rows:
        drop = any(a > 1e-8 for a in row) and any(a < -1e-8 for a in row)
        if snr is not None:
            drop = drop and abs(sum(row)) / (sum(map(abs, row)) + 1e-6) < snr
        want_kept.append(not drop)
    share = {g: statistics.fmean(k for k, h in zip(want_kept, groups, strict=True) if h == g) for g in groups}
    want = [sum(row) * share[g] if k else 0.0 for row, g, k in zip(rows, groups, want_kept, strict=True)]
    if whiten is not None:
        counts = [n * k for n, k in zip(lengths.tolist(), want_kept, strict=True)]
        counts = counts if whiten == "tokens" else [float(k) for k in want_kept]
        want = whitened(want, counts, whiten, 1e-6)
    assert kept.tolist() == want_kept and 0 < sum(want_kept) < len(want_kept)
    assert adv.tolist() == pytest.approx(want, abs=1e-12)
    assert not bool(adv[~kept].any())


def test_grpo_against_a_loop() -> None:
    rewards, group, _ = ragged(2)
    got = grpo_advantages(rewards, group, weights_K=WEIGHTS)
    sums = (rewards * WEIGHTS).sum(-1, keepdim=True).tolist()
    assert got.tolist() == pytest.approx([a for (a,) in per_reward(sums, group.tolist(), 1e-6)], abs=1e-12)
    unscored = rewards.isnan().any(-1)
    assert bool(unscored.any()) and not bool(got[unscored].any())


def test_grpo_leaves_out_what_has_weight_zero_even_if_unscorable() -> None:
    rewards = torch.tensor([[1.0, math.nan], [2.0, 5.0], [4.0, math.nan]])
    got = grpo_advantages(rewards, torch.zeros(3, dtype=torch.int64), weights_K=torch.tensor([1.0, 0.0]))
    assert torch.equal(got, grpo_advantages(rewards[:, :1], torch.zeros(3, dtype=torch.int64)))


@pytest.mark.parametrize(
    ("weights", "before", "after"),
    [
        ((0.5, 0.5), [-0.4872, -0.2249, 0.1624, 0.5497], [-1.1475, -0.5297, 0.3825, 1.2947]),
        ((0.1, 0.9), [0.0526, -0.0950, -0.0175, 0.0599], [0.1950, -0.3524, -0.0650, 0.2224]),
    ],
)
def test_figure_1a(weights, before, after) -> None:
    rewards = torch.zeros(8, 4, 2)
    rewards[:, :, 0] = torch.arange(4.0)
    rewards[0, 0, 1] = 1.0
    group = torch.arange(8).repeat_interleave(4)
    for whiten, want in ((None, before), ("responses", after)):
        adv = gdpo_advantages(rewards.view(32, 2), group, weights_K=torch.tensor(weights), whiten=whiten)
        assert adv.view(8, 4).mean(0).tolist() == pytest.approx(want, abs=5e-5)


def test_token_whitening_equals_whitening_the_copied_tokens() -> None:
    rewards, group, lengths = ragged(3)
    raw = gdpo_advantages(rewards, group, whiten=None)
    tokens = raw.repeat_interleave(lengths)
    want = (tokens - tokens.mean()) / (tokens.var() + 1e-8).sqrt()
    got = gdpo_advantages(rewards, group, lengths_R=lengths, whiten="tokens")
    torch.testing.assert_close(got.repeat_interleave(lengths), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("group_size", [2, 3, 5, 6, 7, 8, 16])
def test_equal_rewards_in_float32_add_exactly_nothing(group_size: int) -> None:
    """SEMANTICS 1: the float32 mean of equal numbers is off by one ulp for half of these values at G = 8."""
    values = torch.cat([torch.arange(1, 176) / 175, torch.arange(1, 176) * 0.1, torch.rand(300) * 1e3])
    equal = values.float().repeat_interleave(group_size)
    group = torch.arange(len(values)).repeat_interleave(group_size)
    rewards = torch.stack([equal, torch.arange(len(equal)).float() % group_size], 1)
    assert not bool(grpo_advantages(equal[:, None], group).any())
    assert not bool(gdpo_advantages(equal[:, None], group).any())
    adv = gdpo_advantages(rewards, group, whiten=None)
    assert torch.equal(adv, gdpo_advantages(rewards[:, 1:], group, whiten=None))
    assert bool(gd2po_advantages(rewards, group, whiten=None)[1].all())  # no false conflict


@pytest.mark.parametrize("value", [0.1, 0.7, 1234.567, -3.0, 1e-8])
def test_rewards_equal_up_to_rounding_are_equal(value: float) -> None:
    up = torch.nextafter(torch.tensor(value), torch.tensor(math.inf))
    rewards = torch.stack([torch.tensor(value), up]).repeat(4)[:, None]
    group = torch.zeros(8, dtype=torch.int64)
    assert not bool(grpo_advantages(rewards, group).any())
    assert not bool(gdpo_advantages(rewards, group, whiten=None).any())
    exact = rewards.double()
    assert bool(gdpo_advantages(exact, group, whiten=None).any())  # not rounding in float64


def test_small_true_differences_are_kept() -> None:
    rewards = torch.tensor([[1000.0], [1000.01], [1000.0], [1000.0]])
    adv = gdpo_advantages(rewards, torch.zeros(4, dtype=torch.int64), whiten=None)
    assert adv.tolist() == pytest.approx([-0.5, 1.5, -0.5, -0.5], abs=1e-3)


def test_grpo_sums_that_cancel_are_equal_up_to_rounding() -> None:
    rewards = torch.tensor([[0.1, 0.2, -0.3], [0.3, -0.2, -0.1], [0.0, 0.0, 0.0], [-0.3, 0.1, 0.2]])
    assert not bool(grpo_advantages(rewards, torch.zeros(4, dtype=torch.int64)).any())


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64], ids=["fp32", "bf16", "fp64"]
)
def test_groups_of_one_and_dtypes(dtype: torch.dtype) -> None:
    rewards = torch.tensor([[3.0, 1.0], [5.0, 2.0]], dtype=dtype)
    group = torch.tensor([4, 9])
    out = [grpo_advantages(rewards, group), gdpo_advantages(rewards, group)]
    out.append(gd2po_advantages(rewards, group, lengths_R=torch.tensor([3, 4]))[0])
    for adv in out:
        assert adv.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert not bool(adv.any())


def test_one_nan_reward_touches_its_own_dimension_alone() -> None:
    rewards = torch.tensor([[1.0, 0.0], [2.0, 1.0], [math.nan, 1.0], [4.0, 0.0]], dtype=torch.float64)
    group = torch.zeros(4, dtype=torch.int64)
    adv = gdpo_advantages(rewards, group, whiten=None)
    rest = gdpo_advantages(rewards[[0, 1, 3], :1], group[:3], whiten=None)
    second = gdpo_advantages(rewards[:, 1:], group, whiten=None)
    torch.testing.assert_close(adv[[0, 1, 3]], rest + second[[0, 1, 3]])
    assert adv[2] == second[2]
    assert bool(gdpo_advantages(rewards, group).isfinite().all())


def test_all_nan() -> None:
    rewards = torch.full((4, 2), math.nan)
    group = torch.zeros(4, dtype=torch.int64)
    for adv in (grpo_advantages(rewards, group), gdpo_advantages(rewards, group)):
        assert torch.equal(adv, torch.zeros(4))


def test_order_of_the_responses_does_not_matter() -> None:
    rewards, group, lengths = ragged(4)
    order = torch.randperm(len(group))
    for whiten in ("responses", "tokens", None):
        options = {"whiten": whiten}
        plain = gdpo_advantages(rewards, group, lengths_R=lengths, **options)
        mixed = gdpo_advantages(rewards[order], group[order], lengths_R=lengths[order], **options)
        torch.testing.assert_close(mixed, plain[order], rtol=1e-12, atol=1e-12)


def test_gd2po_nothing_kept_and_one_kept_token() -> None:
    conflict = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
    group = torch.zeros(2, dtype=torch.int64)
    adv, kept = gd2po_advantages(conflict, group, lengths_R=torch.tensor([5, 6]))
    assert not bool(kept.any()) and torch.equal(adv, torch.zeros(2))
    # One response of one token is kept, with a nonzero advantage.
    rewards = torch.tensor([[1.0, 1.0], [-2.0, 1.0], [1.0, -2.0]])
    group = torch.zeros(3, dtype=torch.int64)
    raw, kept = gd2po_advantages(rewards, group, whiten=None)
    assert kept.tolist() == [True, False, False] and raw[0] != 0
    assert torch.equal(gd2po_advantages(rewards, group, lengths_R=torch.tensor([1, 9, 9]))[0], torch.zeros(3))
    assert torch.equal(gd2po_advantages(rewards, group, whiten="responses")[0], torch.zeros(3))


def test_gd2po_snr_keeps_a_conflict_that_is_clear() -> None:
    rewards = torch.tensor([[10.0, 0.9], [0.0, 1.0], [0.0, 0.95], [0.0, 1.0]])
    group = torch.zeros(4, dtype=torch.int64)
    options = {"lengths_R": torch.ones(4), "weights_K": torch.tensor([1.0, 0.01])}
    assert not gd2po_advantages(rewards, group, **options)[1][0]
    assert gd2po_advantages(rewards, group, snr_threshold=0.8, **options)[1][0]


def test_gd2po_reward_of_weight_zero_never_conflicts() -> None:
    rewards = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
    weights = torch.tensor([1.0, 0.0])
    kept = gd2po_advantages(rewards, torch.zeros(2, dtype=torch.int64), weights_K=weights, whiten=None)[1]
    assert bool(kept.all())


def test_a_response_without_tokens_gets_nothing_and_counts_for_nothing() -> None:
    rewards, group, lengths = ragged(5)
    lengths[2] = 0
    adv = gdpo_advantages(rewards, group, lengths_R=lengths, whiten="tokens")
    assert adv[2] == 0 and bool(adv.isfinite().all())


def test_no_responses() -> None:
    rewards, group = torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64)
    assert grpo_advantages(rewards, group).shape == (0,)
    assert gdpo_advantages(rewards, group).shape == (0,)
    adv, kept = gd2po_advantages(rewards, group, lengths_R=group)
    assert adv.shape == kept.shape == (0,)


def every(rewards: Tensor, group: Tensor, weights: Tensor | None, lengths: Tensor) -> list[Tensor]:
    """All three operations' results, whitened and not."""
    out = [grpo_advantages(rewards, group, weights_K=weights)]
    for whiten in ("responses", "tokens", None):
        options = {"weights_K": weights, "lengths_R": lengths, "whiten": whiten}
        out += [gdpo_advantages(rewards, group, **options), *gd2po_advantages(rewards, group, **options)]
    return out


def equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(some, others, strict=True))


def test_strides_and_the_types_of_weights_and_lengths() -> None:
    rewards, group, lengths = ragged(6)
    want = every(rewards, group, WEIGHTS, lengths)
    strided = (rewards.T.contiguous().T, group.repeat_interleave(2)[::2])
    for weights, counts in itertools.product(
        (WEIGHTS.float(), WEIGHTS.repeat_interleave(3)[::3]),
        (lengths.int(), lengths.float(), lengths.repeat_interleave(2)[::2], lengths.bfloat16()),
    ):
        assert equal(every(*strided, weights, counts), want)
    one = rewards[:1].expand(len(group), 3)
    assert not any(bool(adv.any()) for adv in every(one, group, None, lengths) if adv.is_floating_point())


def test_group_numbers_at_the_ends_of_int64() -> None:
    ends = torch.tensor([-(2**63), 2**63 - 1, 0, -1, -(2**63), 0, 2**63 - 1, -1])
    small = torch.tensor([0, 3, 2, 1, 0, 2, 3, 1])
    rewards, lengths = torch.randn(8, 2, dtype=torch.float64), torch.arange(8)
    assert equal(every(rewards, ends, None, lengths), every(rewards, small, None, lengths))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e200], ids=str)
def test_a_hostile_reward_stays_in_its_group(value: float) -> None:
    rewards, group, _ = ragged(7)
    hostile, others = rewards.clone(), group != group[3]
    hostile[3, 1] = value
    for op in (grpo_advantages, lambda *both: gdpo_advantages(*both, whiten=None)):
        assert torch.equal(op(hostile, group)[others], op(rewards, group)[others])
    options = {"whiten": None}
    for got, want in zip(
        gd2po_advantages(hostile, group, **options), gd2po_advantages(rewards, group, **options), strict=True
    ):
        assert torch.equal(got[others], want[others])


@pytest.mark.parametrize("shape", [(0, 0), (3, 0), (1, 1), (1, 5)], ids=str)
def test_nothing_to_compare_is_zero(shape: tuple[int, int]) -> None:
    for adv in every(
        torch.randn(shape), torch.zeros(shape[0], dtype=torch.int64), None, torch.ones(shape[0])
    ):
        assert adv.shape == shape[:1] and not (adv.is_floating_point() and bool(adv.any()))


def test_result_does_not_depend_on_threads() -> None:
    gen = torch.Generator().manual_seed(8)
    rewards = torch.randn(40_000, 5, generator=gen, dtype=torch.float64)
    group = torch.randint(0, 3000, (40_000,), generator=gen)
    lengths, threads = torch.randint(0, 50, (40_000,), generator=gen), torch.get_num_threads()
    results = []
    try:
        for n_threads in (1, 2):
            torch.set_num_threads(n_threads)
            results.append([x for r in (rewards, rewards.float()) for x in every(r, group, None, lengths)])
    finally:
        torch.set_num_threads(threads)
    assert equal(*results)
