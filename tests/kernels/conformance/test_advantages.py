"""Advantages of every backend against loops in Python, and the traps of SEMANTICS section 1.

The Triton kernel runs in small blocks, so that few responses are several programs; natively on a GPU with its
own as well (test_triton_own.py). Its interpreter takes 0.1 s a group.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from smopd.kernels.reference import advantages as reference
from smopd.kernels.types import AdvantageOptions
from tests.kernels import backends

NAN, INF = math.nan, math.inf
DEFAULTS: dict[str, dict] = {"grpo": {}, "gdpo": {"whiten": "responses"}, "gd2po": {"whiten": "tokens"}}
WHITEN = ("responses", "tokens", None)
EXAMPLES = {"reference": 60, "triton": 12}
each_backend = backends.each("advantages")

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of the interpreter's numpy
    pytest.mark.usefixtures("poisoned_memory", "small_blocks"),
]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Several programs and blocks on few responses."""
    if request.node.callspec.params.get("backend") == "triton":
        backends.need("triton")
        from smopd.kernels.triton import advantages, whiten

        for name, size in (("OWNED", 8), ("TILE", 64)):
            monkeypatch.setattr(advantages, name, size)
        monkeypatch.setattr(whiten, "WHITEN_BLOCK", 4)
        monkeypatch.setattr(whiten, "SLOT_BLOCK", 2)


def serve(backend: str, kind: str, rewards: Tensor, group: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """A backend's result, with the public functions' defaults."""
    given_options = AdvantageOptions(kind, **DEFAULTS[kind] | options)
    adv, kept = backends.call(backend, "advantages", rewards, group, given_options)
    assert (kept is None) == (kind != "gd2po")
    return (adv,) if kept is None else (adv, kept)


def adv_of(backend: str, kind: str, rewards: Tensor, group: Tensor, **options: Any) -> Tensor:
    return serve(backend, kind, rewards, group, **options)[0]


def every(backend: str, rewards: Tensor, group: Tensor, **options: Any) -> list[Tensor]:
    """All three operations' results, whitened and not."""
    lengths = options.pop("lengths_R", torch.ones(len(group)))
    out = [*serve(backend, "grpo", rewards, group, **options)]
    for whiten in WHITEN[1:2] if backends.interpreted(backend) else WHITEN:
        options |= {"lengths_R": lengths, "whiten": whiten}
        out += [*serve(backend, "gdpo", rewards, group, **options)]
        out += [*serve(backend, "gd2po", rewards, group, **options)]
    return out


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


def whitened(adv: list[float], counts: list[float], kind: str | None, norm_eps: float) -> list[float]:
    n = sum(counts)
    if kind is None:
        return adv
    if n <= 1:
        return [0.0] * len(adv)
    mean = sum(c * a for c, a in zip(counts, adv, strict=True)) / n
    var = sum(c * (a - mean) ** 2 for c, a in zip(counts, adv, strict=True)) / (n - 1)
    scale = math.sqrt(var + 1e-8) if kind == "tokens" else math.sqrt(var) + norm_eps
    return [(a - mean) / scale if c > 0 else 0.0 for c, a in zip(counts, adv, strict=True)]


def ragged(backend: str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Groups of 1 to 6 in shuffled order, three rewards of which one is sparse, a few NaN."""
    gen = torch.Generator().manual_seed(seed)
    n_groups = 4 if backends.interpreted(backend) else 15
    sizes = torch.randint(1, 7, (n_groups,), generator=gen)
    group = torch.repeat_interleave(torch.randint(-(2**62), 2**62, (n_groups,), generator=gen), sizes)
    group = group[torch.randperm(len(group), generator=gen)]
    rewards = torch.randn(len(group), 3, generator=gen, dtype=torch.float64)
    rewards[:, 1] = (rewards[:, 1] > 1).double()
    rewards[torch.rand(rewards.shape, generator=gen) < 0.05] = NAN
    lengths = torch.randint(1, 50, (len(group),), generator=gen)
    return rewards if backend == "reference" else rewards.float(), group, lengths


def near(backend: str) -> dict[str, float]:
    """fp64 inside: what is left is the rounding of the result."""
    return {"abs": 1e-12} if backend == "reference" else {"rel": 1e-6, "abs": 1e-7}


LAYOUTS = {
    "rising": [-(2**62), -3, -3, -3, 0, 0, 0, 5, 5, 5, 5, 2**62, 2**62],
    "falling": [9, 9, 9, 8, 8, 7, 7, 7, 1, -4, -4, -4, -4],
    "runs in no order": [4, 4, 9, 9, 9, 2, 2, 2, 2, 7, 7, 7, 5],
    "a group comes back": [1, 1, 2, 2, 3, 3, 3, 4, 4, 4, 1, 1, 1],
    "rising in each program, not over all": [5, 5, 6, 6, 7, 7, 8, 8, 5, 5, 6, 6, 7],
    "a run of 9": [1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 3],
    "one group": [3] * 13,
}


@each_backend
@pytest.mark.parametrize("layout", LAYOUTS)
def test_wherever_groups_lie(layout: str, backend: str) -> None:
    """On a GPU they are sorted first, and a response walks through its run."""
    gen, ids = torch.Generator().manual_seed(11), LAYOUTS[layout]
    rewards, group = torch.randn(13, 3, generator=gen), torch.tensor(ids)
    rewards[torch.rand(rewards.shape, generator=gen) < 0.1] = NAN
    lengths = torch.randint(0, 50, (13,), generator=gen)
    rows = per_reward(rewards.tolist(), ids, 1e-6)
    raw = [sum(row) for row in rows]
    for whiten in WHITEN:
        got = adv_of(backend, "gdpo", rewards, group, lengths_R=lengths, whiten=whiten)
        counts = [float(n) for n in lengths] if whiten == "tokens" else [1.0] * 13
        assert got.tolist() == pytest.approx(whitened(raw, counts, whiten, 1e-6), rel=1e-5, abs=1e-6)
    for kind in ("grpo", "gd2po"):
        results = [serve(name, kind, rewards, group, lengths_R=lengths) for name in (backend, "reference")]
        for x, y in zip(*results, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-7)


WEIGHTS = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)


@each_backend
@pytest.mark.parametrize("norm_eps", [1e-6, 0.0, 1e-1])
def test_grpo_and_gdpo_against_a_loop(norm_eps: float, backend: str) -> None:
    rewards, group, lengths = ragged(backend)
    options = {"weights_K": WEIGHTS, "norm_eps": norm_eps}
    rows = per_reward(rewards.tolist(), group.tolist(), norm_eps)
    raw = [sum(w * a for w, a in zip(WEIGHTS.tolist(), row, strict=True)) for row in rows]
    for whiten in WHITEN:
        got = adv_of(backend, "gdpo", rewards, group, lengths_R=lengths, whiten=whiten, **options)
        counts = lengths.tolist() if whiten == "tokens" else [1.0] * len(raw)
        assert got.tolist() == pytest.approx(whitened(raw, counts, whiten, norm_eps), **near(backend))
    got = adv_of(backend, "grpo", rewards, group, **options)
    sums = (rewards.double() * WEIGHTS).sum(-1, keepdim=True).tolist()
    want = [a for (a,) in per_reward(sums, group.tolist(), norm_eps)]
    assert got.tolist() == pytest.approx(want, **near(backend))
    unscored = rewards.isnan().any(-1)
    assert bool(unscored.any()) and not bool(got[unscored].any())


@each_backend
@pytest.mark.parametrize("snr", [None, 0.2, 0.8])
def test_gd2po_against_a_loop(snr: float | None, backend: str) -> None:
    rewards, group, lengths = ragged(backend, 1)
    rows, groups = per_reward(rewards.tolist(), group.tolist(), 1e-6), group.tolist()
    want_kept = []
    for row in rows:
        drop = any(a > 1e-8 for a in row) and any(a < -1e-8 for a in row)
        if snr is not None:
            drop = drop and abs(sum(row)) / (sum(map(abs, row)) + 1e-6) < snr
        want_kept.append(not drop)
    share = {g: statistics.fmean(k for k, h in zip(want_kept, groups, strict=True) if h == g) for g in groups}
    raw = [sum(row) * share[g] if k else 0.0 for row, g, k in zip(rows, groups, want_kept, strict=True)]
    for whiten in WHITEN:
        options = {"lengths_R": lengths, "whiten": whiten, "snr_threshold": snr}
        adv, kept = serve(backend, "gd2po", rewards, group, **options)
        counts = [n * k for n, k in zip(lengths.tolist(), want_kept, strict=True)]
        counts = counts if whiten == "tokens" else [float(k) for k in want_kept]
        assert kept.tolist() == want_kept and 0 < sum(want_kept) < len(want_kept)
        assert adv.tolist() == pytest.approx(whitened(raw, counts, whiten, 1e-6), **near(backend))
        assert not bool(adv[~kept].any())


@st.composite
def batches(draw) -> tuple[Tensor, ...]:
    """Up to five groups, rewards that repeat, conflict, differ by rounding or cannot be scored."""
    n_responses, n_rewards = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    group = draw(st.lists(st.integers(-2, 2), min_size=n_responses, max_size=n_responses))
    value = st.sampled_from([0.0, 1.0, 1.0 + 2.0**-23, -1.0, 0.1, 0.7, 3.0, NAN, 1e-30, 1e30, INF])
    count = n_responses * n_rewards
    rewards = draw(st.lists(value, min_size=count, max_size=count))
    weights = draw(st.lists(st.sampled_from([0.0, 0.3, 1.0, -0.5]), min_size=n_rewards, max_size=n_rewards))
    lengths = draw(st.lists(st.integers(0, 9), min_size=n_responses, max_size=n_responses))
    rewards_RK = torch.tensor(rewards).reshape(n_responses, n_rewards)
    return rewards_RK, torch.tensor(group) * (2**61), torch.tensor(weights), torch.tensor(lengths)


@backends.each("advantages", but=("reference",))
@pytest.mark.parametrize("kind", DEFAULTS)
def test_any_batch_is_the_definitions(kind: str, backend: str) -> None:
    @settings(max_examples=EXAMPLES[backend], deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(
        batches(), st.sampled_from(WHITEN), st.sampled_from([None, 0.21, 0.83]), st.sampled_from([0.0, 1e-6])
    )
    def hold(batch: tuple, whiten: str | None, snr: float | None, norm_eps: float) -> None:
        rewards, group, weights, lengths = batch
        options = {"weights_K": weights, "norm_eps": norm_eps}
        if kind != "grpo":
            options |= {"lengths_R": lengths, "whiten": whiten}
        if kind == "gd2po":
            options["snr_threshold"] = snr
        got = serve(backend, kind, rewards, group, **options)
        want = reference.advantages(rewards, group, AdvantageOptions(kind, **DEFAULTS[kind] | options))
        for x, y in zip(got, want, strict=False):
            torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-9)

    hold()


@backends.each("advantages", but=("triton",))
@pytest.mark.parametrize(
    ("weights", "before", "after"),
    [
        ((0.5, 0.5), [-0.4872, -0.2249, 0.1624, 0.5497], [-1.1475, -0.5297, 0.3825, 1.2947]),
        ((0.1, 0.9), [0.0526, -0.0950, -0.0175, 0.0599], [0.1950, -0.3524, -0.0650, 0.2224]),
    ],
)
def test_figure_1a(weights, before, after, backend: str) -> None:
    rewards = torch.zeros(8, 4, 2)
    rewards[:, :, 0] = torch.arange(4.0)
    rewards[0, 0, 1] = 1.0
    group = torch.arange(8).repeat_interleave(4)
    for whiten, want in ((None, before), ("responses", after)):
        options = {"weights_K": torch.tensor(weights), "whiten": whiten}
        adv = adv_of(backend, "gdpo", rewards.view(32, 2), group, **options)
        assert adv.view(8, 4).mean(0).tolist() == pytest.approx(want, abs=5e-5)


@each_backend
@pytest.mark.parametrize("group_size", [2, 3, 5, 6, 7, 8, 16])
def test_equal_rewards_in_float32_add_exactly_nothing(group_size: int, backend: str) -> None:
    """SEMANTICS 1: the float32 mean of equal numbers is off by one ulp for half of these values at G = 8."""
    values = torch.cat([torch.arange(1, 176) / 175, torch.arange(1, 176) * 0.1, torch.arange(1, 301) * 3.3])
    if backends.interpreted(backend):
        backends.leave_to_a_gpu(backend, group_size not in (3, 8))
        values = torch.tensor([0.1, 0.7, 2.3, -1.1])
    equal = values.float().repeat_interleave(group_size)
    group = torch.arange(len(values)).repeat_interleave(group_size)
    rewards = torch.stack([equal, torch.arange(len(equal)).float() % group_size], 1)
    assert not bool(adv_of(backend, "grpo", equal[:, None], group).any())
    assert not bool(adv_of(backend, "gdpo", equal[:, None], group).any())
    adv = adv_of(backend, "gdpo", rewards, group, whiten=None)
    assert torch.equal(adv, adv_of(backend, "gdpo", rewards[:, 1:], group, whiten=None))
    assert bool(serve(backend, "gd2po", rewards, group, whiten=None)[1].all())  # no false conflict


@each_backend
@pytest.mark.parametrize("value", [0.1, 0.7, 1234.567, -3.0, 1e-8])
def test_rewards_equal_up_to_rounding_are_equal(value: float, backend: str) -> None:
    up = torch.nextafter(torch.tensor(value), torch.tensor(INF))
    rewards = torch.stack([torch.tensor(value), up]).repeat(4)[:, None]
    group = torch.zeros(8, dtype=torch.int64)
    assert not bool(adv_of(backend, "grpo", rewards, group).any())
    assert not bool(adv_of(backend, "gdpo", rewards, group, whiten=None).any())
    if backend == "reference":  # not rounding in float64
        assert bool(adv_of(backend, "gdpo", rewards.double(), group, whiten=None).any())


@each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_types_and_groups_of_one(dtype: torch.dtype, backend: str) -> None:
    if dtype == torch.float64 and backend == "triton":
        pytest.skip("float64 is the reference's: dispatch gives it no other")
    rewards = torch.tensor([[3.0, 1.0], [5.0, 2.0]], dtype=dtype)
    for adv in every(backend, rewards, torch.tensor([4, 9])):
        if adv.is_floating_point():
            assert adv.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            assert not bool(adv.any())
    rewards, group, lengths = ragged(backend, 4)
    low = rewards.to(dtype)
    got = adv_of(backend, "gdpo", low, group, lengths_R=lengths, whiten="tokens")
    wide = adv_of("reference", "gdpo", low.double(), group, lengths_R=lengths, whiten="tokens")
    torch.testing.assert_close(got.double(), wide, rtol=1e-6, atol=1e-7)


@each_backend
def test_one_nan_reward_touches_its_own_dimension_alone(backend: str) -> None:
    rewards = torch.tensor([[1.0, 0.0], [2.0, 1.0], [NAN, 1.0], [4.0, 0.0]])
    group = torch.zeros(4, dtype=torch.int64)
    adv = adv_of(backend, "gdpo", rewards, group, whiten=None)
    rest = adv_of(backend, "gdpo", rewards[[0, 1, 3], :1], group[:3], whiten=None)
    second = adv_of(backend, "gdpo", rewards[:, 1:], group, whiten=None)
    torch.testing.assert_close(adv[[0, 1, 3]], rest + second[[0, 1, 3]])
    assert adv[2] == second[2] and bool(adv_of(backend, "gdpo", rewards, group).isfinite().all())
    for adv in every(backend, torch.full((4, 2), NAN), group):
        assert not adv.is_floating_point() or torch.equal(adv, torch.zeros(4))


@each_backend
def test_nothing_kept_and_one_kept_token_are_zero(backend: str) -> None:
    conflict, group = torch.tensor([[1.0, -1.0], [-1.0, 1.0]]), torch.zeros(3, dtype=torch.int64)
    adv, kept = serve(backend, "gd2po", conflict, group[:2], lengths_R=torch.tensor([5, 6]))
    assert not bool(kept.any()) and torch.equal(adv, torch.zeros(2))
    # One response of one token is kept, with a nonzero advantage.
    rewards = torch.tensor([[1.0, 1.0], [-2.0, 1.0], [1.0, -2.0]])
    raw, kept = serve(backend, "gd2po", rewards, group, whiten=None)
    assert kept.tolist() == [True, False, False] and raw[0] != 0
    for options in ({"lengths_R": torch.tensor([1, 9, 9])}, {"whiten": "responses"}):
        assert torch.equal(adv_of(backend, "gd2po", rewards, group, **options), torch.zeros(3))


@each_backend
def test_neither_order_nor_strides_nor_repetition_matter(backend: str) -> None:
    rewards, group, lengths = ragged(backend, 6)
    options = {"weights_K": WEIGHTS, "lengths_R": lengths}
    want = every(backend, rewards, group, **options)
    assert backends.same(every(backend, rewards, group, **options), want)
    strided = (rewards.T.contiguous().T, group.repeat_interleave(2)[::2])
    others = [
        (WEIGHTS.repeat_interleave(3)[::3], lengths.repeat_interleave(2)[::2]),
        (WEIGHTS.float(), lengths.int()),
    ]
    if backend == "reference":
        others += [(WEIGHTS, lengths.float()), (WEIGHTS, lengths.bfloat16())]
    for weights, counts in others:
        assert backends.same(every(backend, *strided, weights_K=weights, lengths_R=counts), want)
    order = torch.randperm(len(group), generator=torch.manual_seed(0))
    mixed = every(backend, rewards[order], group[order], weights_K=WEIGHTS, lengths_R=lengths[order])
    for got, wanted in zip(mixed, want, strict=True):
        close = {"rtol": 1e-12, "atol": 1e-12} if backend == "reference" else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(got, wanted[order], **(close if got.is_floating_point() else {}))
    one = rewards[:1].nan_to_num().expand(len(group), 3)
    assert not any(bool(adv.any()) for adv in every(backend, one, group) if adv.is_floating_point())


@each_backend
@pytest.mark.parametrize("shape", [(0, 2), (0, 0), (3, 0), (1, 1), (1, 5)], ids=str)
def test_nothing_to_compare_is_zero(shape: tuple[int, int], backend: str) -> None:
    rewards = torch.randn(shape, generator=torch.manual_seed(0))
    if backend == "triton" and shape[1] == 0:
        with pytest.raises(ValueError, match="grpo_advantages: K is 0, expected 1 to 32"):
            every(backend, rewards, torch.zeros(shape[0], dtype=torch.int64))
        return
    for adv in every(backend, rewards, torch.zeros(shape[0], dtype=torch.int64)):
        assert adv.shape == shape[:1] and not (adv.is_floating_point() and bool(adv.any()))


@backends.each("advantages", but=("triton",))
def test_threads_do_not_show(backend: str, each_number_of_threads) -> None:
    """Nor in sums over responses, which torch cuts for its threads where they are many."""
    gen = torch.Generator().manual_seed(8)
    rewards = torch.randn(40_000, 5, generator=gen, dtype=torch.float64)
    group = torch.randint(0, 3000, (40_000,), generator=gen)
    lengths = torch.randint(0, 50, (40_000,), generator=gen)
    few = slice(0, 8_000)

    def call() -> list[Tensor]:
        options = {"lengths_R": lengths, "whiten": "tokens"}
        out = [adv_of(backend, "gdpo", rewards[:, :1], group, **options)]
        for each in (rewards[few], rewards[few].float()):
            out += every(backend, each, group[few], lengths_R=lengths[few])
        return out

    results = each_number_of_threads(call, (1, 2))
    assert all(backends.same(result, results[0]) for result in results)


@each_backend
def test_what_has_weight_zero_is_left_out_even_if_unscorable(backend: str) -> None:
    rewards = torch.tensor([[1.0, NAN], [2.0, 5.0], [4.0, NAN]])
    group = torch.zeros(3, dtype=torch.int64)
    got = adv_of(backend, "grpo", rewards, group, weights_K=torch.tensor([1.0, 0.0]))
    assert torch.equal(got, adv_of(backend, "grpo", rewards[:, :1], group))
    conflict = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
    options = {"weights_K": torch.tensor([1.0, 0.0]), "whiten": None}
    assert bool(serve(backend, "gd2po", conflict, group[:2], **options)[1].all())
