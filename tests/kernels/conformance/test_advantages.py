"""Advantages on every backend against loops over groups.

Triton uses small blocks, so that few responses take several programs.
"""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from smopd import ops
from smopd.kernels.types import AdvantageOptions
from tests.kernels import backends

NAN, INF = math.nan, math.inf
DEFAULTS: dict[str, dict] = {"grpo": {}, "gdpo": {"whiten": "responses"}, "gd2po": {"whiten": "tokens"}}
PUBLIC = {"grpo": ops.grpo_advantages, "gdpo": ops.gdpo_advantages, "gd2po": ops.gd2po_advantages}
WHITEN = ("responses", "tokens", None)
EXAMPLES = 8
SHARED = 33_000  # more than torch sums on one thread
each_backend = backends.each("advantages")

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # from numpy in the interpreter
    pytest.mark.usefixtures("small_blocks"),
]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if request.node.callspec.params.get("backend") == "triton":
        backends.need("triton")
        from smopd.kernels.triton import advantages, whiten

        for name, size in (("OWNED", 4), ("TILE", 64), ("SORTED", 8), ("SCANNED", 16)):
            monkeypatch.setattr(advantages, name, size)
        monkeypatch.setattr(whiten, "WHITEN_BLOCK", 4)
        monkeypatch.setattr(whiten, "SLOT_BLOCK", 2)


def serve(backend: str, kind: str, rewards: Tensor, group: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """Call a backend; for the reference the public functions, which it serves on a CPU."""
    if backend == "reference":
        result = PUBLIC[kind](rewards, group, **options)
        return result if kind == "gd2po" else (result,)
    given_options = AdvantageOptions(kind, **DEFAULTS[kind] | options)
    adv, kept = backends.call(backend, "advantages", rewards, group, given_options)
    assert (kept is None) == (kind != "gd2po")
    return (adv,) if kept is None else (adv, kept)


def adv_of(backend: str, kind: str, rewards: Tensor, group: Tensor, **options: Any) -> Tensor:
    return serve(backend, kind, rewards, group, **options)[0]


def every(backend: str, rewards: Tensor, group: Tensor, **options: Any) -> list[Tensor]:
    """Return the results of all three operations, whitened and not."""
    lengths = options.pop("lengths_R", torch.ones(len(group)))
    out = [*serve(backend, "grpo", rewards, group, **options)]
    for whiten in WHITEN[1:2] if backends.interpreted(backend) else WHITEN:
        options |= {"lengths_R": lengths, "whiten": whiten}
        out += [*serve(backend, "gdpo", rewards, group, **options)]
        out += [*serve(backend, "gd2po", rewards, group, **options)]
    return out


def definition(kind: str, rewards: Tensor, group: Tensor, **options: Any) -> tuple[Any, Any]:
    """Compute advantages and, for GD2PO, kept by loops in numpy's float64."""
    given = {"norm_eps": 1e-6, "snr_threshold": None, "whiten": None} | DEFAULTS[kind] | options
    values, norm_eps, groups = rewards.double().numpy(), given["norm_eps"], group.numpy()
    weights = given["weights_K"].numpy() if "weights_K" in given else np.ones(values.shape[1])
    if kind == "grpo":
        values, weights = np.where(weights != 0, weights * values, 0.0).sum(1, keepdims=True), np.ones(1)
    normalised = np.zeros_like(values)
    for one, k in itertools.product(np.unique(groups), range(values.shape[1])):
        rows = (groups == one) & ~np.isnan(values[:, k])
        if rows.sum() > 1 and np.ptp(known := values[rows, k]) > 0:
            normalised[rows, k] = (known - known.mean()) / (known.std(ddof=1) + norm_eps)
    parts = weights * normalised
    adv, counts, kept = parts.sum(1), np.ones(len(groups)), None
    if given["whiten"] == "tokens":
        counts = given["lengths_R"].double().numpy()
    counts = counts * (~np.isnan(values) & (weights != 0)).any(1)  # what no reward scored trains nothing
    if kind == "gd2po":
        conflict = (parts > 1e-8).any(1) & (parts < -1e-8).any(1)
        if given["snr_threshold"] is not None:
            conflict &= np.abs(adv) / (np.abs(parts).sum(1) + norm_eps) < given["snr_threshold"]
        kept = ~conflict
        adv = adv * kept * np.array([kept[groups == one].mean() for one in groups])
        counts = counts * kept
    if given["whiten"] is not None:
        mean = (counts * adv).sum() / counts.sum()
        var = (counts * (adv - mean) ** 2).sum() / (counts.sum() - 1)
        scale = np.sqrt(var + 1e-8) if given["whiten"] == "tokens" else np.sqrt(var) + norm_eps
        adv = np.where(counts > 0, (adv - mean) / scale, 0.0)
    return adv, kept


def ragged(backend: str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return shuffled groups of 1 to 6 responses with three rewards, one of them sparse, and some NaN."""
    gen = torch.Generator().manual_seed(seed)
    n_groups = 4 if backends.interpreted(backend) else 15
    sizes = torch.randint(1, 7, (n_groups,), generator=gen)
    group = torch.repeat_interleave(torch.randint(-(2**62), 2**62, (n_groups,), generator=gen), sizes)
    group = group[torch.randperm(len(group), generator=gen)]
    rewards = torch.randn(len(group), 3, generator=gen, dtype=torch.float64)
    rewards[:, 1] = (rewards[:, 1] > 1).double()
    rewards[torch.rand(rewards.shape, generator=gen) < 0.05] = NAN
    rewards[3] = NAN
    lengths = torch.randint(1, 50, (len(group),), generator=gen)
    return rewards if backend == "reference" else rewards.float(), group, lengths


WEIGHTS = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)
CASES: list[tuple[str, dict[str, Any]]] = [
    ("grpo", {}),
    ("grpo", {"weights_K": WEIGHTS, "norm_eps": 0.1}),
    *(("gdpo", {"weights_K": WEIGHTS, "norm_eps": 0.1, "whiten": whiten}) for whiten in WHITEN),
    *(("gd2po", {"whiten": whiten, "snr_threshold": 0.2}) for whiten in WHITEN),
    *(("gd2po", {"snr_threshold": snr}) for snr in (None, 0.8)),
    ("gd2po", {"weights_K": WEIGHTS, "snr_threshold": 0.5}),
    *((kind, {"weights_K": torch.tensor([1.0, 0.0, 0.5])}) for kind in ("grpo", "gd2po")),
]


@each_backend
@pytest.mark.parametrize(("kind", "options"), CASES, ids=[str(number) for number in range(len(CASES))])
def test_equals_a_loop(kind: str, options: dict[str, Any], backend: str) -> None:
    rewards, group, lengths = ragged(backend, 1)
    options = options if kind == "grpo" else options | {"lengths_R": lengths}
    want, want_kept = definition(kind, rewards, group, **options)
    adv, *kept = serve(backend, kind, rewards, group, **options)
    near = {"abs": 1e-12} if backend == "reference" else {"rel": 1e-6, "abs": 1e-7}  # fp64 inside
    assert adv.numpy() == pytest.approx(want, **near)
    if kept:
        assert (kept[0].numpy() == want_kept).all() and 0 < want_kept.sum() < len(want_kept)


@st.composite
def batches(draw) -> tuple[Tensor, ...]:
    """Draw up to five groups with rewards that repeat, conflict, differ by rounding or are NaN."""
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
    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
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
        want = serve("reference", kind, rewards, group, **options)
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
@pytest.mark.parametrize("group_size", [3, 8])
def test_rewards_equal_up_to_rounding_add_exactly_nothing(group_size: int, backend: str) -> None:
    """The float32 mean of eight equal numbers is off by one ulp for half of these values."""
    values = torch.cat([torch.arange(1, 176) / 175, torch.arange(1, 176) * 0.1, torch.arange(1, 301) * 3.3])
    if backends.interpreted(backend):
        values = torch.tensor([0.7, -1234.567])
    equal = values.float().repeat_interleave(group_size)
    group = torch.arange(len(values)).repeat_interleave(group_size)
    for same in (equal, torch.where(torch.arange(len(equal)) % 2 == 0, equal, equal.nextafter(2 * equal))):
        assert not bool(adv_of(backend, "grpo", same[:, None], group).any())
        rewards = torch.stack([same, torch.arange(len(same)).float() % group_size], 1)
        adv = adv_of(backend, "gdpo", rewards, group, whiten=None)
        assert torch.equal(adv, adv_of(backend, "gdpo", rewards[:, 1:], group, whiten=None))
        assert bool(serve(backend, "gd2po", rewards, group, whiten=None)[1].all())  # no false conflict


@each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_types_and_groups_of_one(dtype: torch.dtype, backend: str) -> None:
    if dtype == torch.float64 and backend == "triton":
        pytest.skip("only the reference gets float64")
    rewards, group, _ = ragged(backend, 4)
    got = adv_of(backend, "grpo", rewards.to(dtype), group)
    wide = adv_of("reference", "grpo", rewards.to(dtype).double(), group)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(got.double(), wide, rtol=1e-6, atol=1e-7)
    alone = every(backend, rewards[:2].nan_to_num().to(dtype), torch.tensor([4, 9]))
    assert not any(bool(adv.any()) for adv in alone if adv.is_floating_point())


@each_backend
def test_one_kept_token_is_zero(backend: str) -> None:
    rewards, group = torch.tensor([[1.0, 1.0], [-2.0, 1.0], [1.0, -2.0]]), torch.zeros(3, dtype=torch.int64)
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
    others = {"weights_K": WEIGHTS.float().repeat_interleave(3)[::3], "lengths_R": lengths.int()}
    assert backends.same(every(backend, *strided, **others), want)
    order = torch.randperm(len(group), generator=torch.manual_seed(0))
    mixed = every(backend, rewards[order], group[order], weights_K=WEIGHTS, lengths_R=lengths[order])
    for got, wanted in zip(mixed, want, strict=True):
        close = {"rtol": 1e-12, "atol": 1e-12} if backend == "reference" else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(got, wanted[order], **(close if got.is_floating_point() else {}))


@each_backend
@pytest.mark.parametrize("shape", [(0, 2), (0, 0), (3, 0), (1, 5)], ids=str)
def test_nothing_to_compare_is_zero(shape: tuple[int, int], backend: str) -> None:
    rewards = torch.randn(shape, generator=torch.manual_seed(0))
    if backend == "triton" and shape[1] == 0:
        pytest.skip("only the reference gets K = 0")
    for given_rewards in (rewards, torch.full_like(rewards, NAN)):
        for adv in every(backend, given_rewards, torch.zeros(shape[0], dtype=torch.int64)):
            assert adv.shape == shape[:1] and not (adv.is_floating_point() and bool(adv.any()))


@backends.each("advantages", but=("triton",))
def test_bits_do_not_depend_on_threads(backend: str, each_number_of_threads) -> None:
    gen = torch.Generator().manual_seed(8)
    rewards = torch.randn(SHARED, 2, generator=gen, dtype=torch.float64)
    group = torch.randint(0, 3000, (SHARED,), generator=gen)
    lengths = {"lengths_R": torch.randint(0, 50, (SHARED,), generator=gen)}
    given_lengths = {"grpo": {}, "gdpo": lengths, "gd2po": lengths}

    def call() -> list[tuple[Tensor, ...]]:
        return [serve(backend, kind, rewards, group, **given_lengths[kind]) for kind in DEFAULTS]

    assert backends.same(*each_number_of_threads(call, (1, 2)))
