"""teacher_product on every backend against float64, with repeats, ties and missing ids."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from smopd.kernels import dispatch
from smopd.ops import Mixture, teacher_product
from tests.kernels import backends

INF, NAN = math.inf, math.nan
V = 2000  # more than any id
TOLERANCE = 2e-5  # nats, of log-probabilities of about -20

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(params=dispatch.MODULES["teacher_product"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Force each backend for the public function."""
    backends.need(request.param)
    monkeypatch.setenv(dispatch.ENV, request.param)
    return request.param


def product(backend: str, *lists: Any, **options: Any) -> Mixture:
    return backends.moved(teacher_product(*backends.moved(lists, backends.device(backend)), **options), "cpu")


def truth(ids: Tensor, logps: Tensor, weights: Tensor, reference=-1, clip=INF, keep_raised=INF) -> Tensor:
    """Return the (N, V) true log-probabilities; -inf off the support."""
    n_rows, n_models, _ = ids.shape
    p_NMV = torch.zeros(n_rows, n_models, V, dtype=torch.float64)
    p_NMV.scatter_add_(-1, ids.masked_fill(logps == -INF, 0).long(), logps.double().exp())
    models = list(p_NMV.log().unbind(1))
    base_NV = models.pop(reference)
    changes_NMV = torch.stack([torch.zeros_like(base_NV), *(model - base_NV for model in models)], 1)
    weights_NM1 = weights.double().expand(n_rows, n_models - 1)[..., None]
    changes_NMV[:, 1:] = weights_NM1 * changes_NMV[:, 1:].clamp(-clip, clip)
    raised_N1V = (changes_NMV > keep_raised).any(1, keepdim=True)
    changes_NMV = torch.where(raised_N1V, changes_NMV.clamp(min=0.0), changes_NMV)
    value_NV = torch.where((p_NMV > 0).all(1), base_NV + changes_NMV.sum(1), -INF)
    return torch.where(value_NV > -INF, value_NV - value_NV.logsumexp(-1, keepdim=True), -INF)


def check(backend: str, ids: Tensor, logps: Tensor, weights: Tensor, kappa: int, **options) -> Mixture:
    """Check the value of each id, that ids are distinct, and the order."""
    got = product(backend, ids, logps, weights, kappa, **options)
    assert got.ids_NS.shape == got.logps_NS.shape == (ids.shape[0], kappa)
    assert got.ids_NS.dtype == torch.int32 and got.logps_NS.dtype == got.mass_N.dtype == torch.float32
    true_NV = truth(ids, logps, weights, **{name: x for name, x in options.items() if x is not None})
    true_NS = torch.nn.functional.pad(true_NV, (0, kappa), value=-INF)
    true_NS = true_NS.sort(dim=-1, descending=True, stable=True).values[:, :kappa]
    torch.testing.assert_close(got.logps_NS.double(), true_NS, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(got.mass_N.double(), true_NS.exp().sum(-1), rtol=0, atol=10 * TOLERANCE)
    live_NS = true_NS > -INF
    own_NS = true_NV.gather(-1, got.ids_NS.long())
    torch.testing.assert_close(
        got.logps_NS[live_NS].double(), own_NS[live_NS], rtol=TOLERANCE, atol=TOLERANCE
    )
    (value, after), (first, second) = ((x[:, :-1], x[:, 1:]) for x in (got.logps_NS, got.ids_NS))
    assert bool(((value > after) | ((value == after) & (first < second)))[live_NS[:, 1:]].all())
    assert not got.ids_NS[~live_NS].any()
    return got


def random_case(n_rows: int, n_models: int, n_support: int, seed: int = 0, by_row: bool = True):
    """Return models that give most of the same ids in different orders; some slots are empty."""
    gen = torch.Generator().manual_seed(seed)
    order = torch.rand(n_rows, n_models, n_support, generator=gen).argsort(-1)
    base = torch.randint(0, 1000, (n_rows, 1, 1), generator=gen)
    logps = 3.0 * torch.randn(n_rows, n_models, n_support, generator=gen) - 6.0
    logps[torch.rand(logps.shape, generator=gen) < 0.1] = -INF
    shape = (n_rows, n_models - 1) if by_row else (n_models - 1,)
    return base + 3 * order, logps, 1.5 * torch.rand(shape, generator=gen)


@pytest.mark.parametrize(
    ("n_rows", "n_models", "n_support", "kappa"),
    [(1, 1, 1, 1), (3, 2, 16, 16), (37, 3, 7, 5), (2, 3, 48, 16), (2, 5, 20, 130), (1, 3, 192, 64)],
    ids=str,
)
@pytest.mark.parametrize(
    "options",
    [{}, {"clip": 1.5, "reference": 0}, {"keep_raised": 0.0}, {"clip": 2.0, "keep_raised": 0.7}],
    ids=["plain", "clip", "keep", "both"],
)
def test_equals_float64(
    backend: str, n_rows: int, n_models: int, n_support: int, kappa: int, options
) -> None:
    n_rows = len(backends.rows_for(backend, n_rows))
    for by_row in (True, False):  # a weight for each row and model, or for each model
        check(backend, *random_case(n_rows, n_models, n_support, by_row=by_row), kappa, **options)


@st.composite
def drawn_lists(draw):
    """Draw lists of few ids, which repeat, tie and are missing; slots may be empty or hold -0.0."""
    n_rows, n_models, n_support = draw(st.integers(0, 2)), draw(st.integers(1, 4)), draw(st.integers(0, 6))
    count = n_rows * n_models * n_support
    ids = draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    value = st.one_of(st.just(-INF), st.floats(-100, 0, width=32), st.sampled_from([-1.0, -2.0, -0.0]))
    logps = draw(st.lists(value, min_size=count, max_size=count))
    weight = st.sampled_from([0.0, 0.5, 1.0, 2.0, -1.0])
    weights = draw(st.lists(weight, min_size=n_models - 1, max_size=n_models - 1))
    shape = (n_rows, n_models, n_support)
    options = {
        "reference": draw(st.integers(-n_models, n_models - 1)),
        "clip": draw(st.sampled_from([None, 0.5, 4.0])),
        "keep_raised": draw(st.sampled_from([None, 0.0, 0.25])),
    }
    floats = [torch.tensor(values, dtype=torch.float32) for values in (logps, weights)]
    case = (torch.tensor(ids, dtype=torch.int64).reshape(shape), floats[0].reshape(shape), floats[1])
    return case, draw(st.integers(0, 9)), options


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn_lists())
def test_any_lists(backend: str, drawn) -> None:
    case, kappa, options = drawn
    check(backend, *case, kappa, **options)


def test_a_nan_makes_its_row_nan_where_every_model_gave_the_id(backend: str) -> None:
    ids = torch.tensor([[[4, 2, 6], [2, 6, 1]]]).expand(3, 2, 3).contiguous()
    logps = torch.full((3, 2, 3), -1.0)
    logps[0, 0, 1] = logps[2, 1, 1] = NAN  # ids 2 and 6, which both gave
    logps[1, 0, 0] = logps[1, 1, 2] = NAN  # ids 4 and 1, which one did
    for keep_raised in (None, 0.0):
        out = product(backend, ids, logps, torch.ones(1), 3, clip=1.0, keep_raised=keep_raised)
        assert out.ids_NS.tolist() == [[2, 6, 0]] * 3
        assert out.logps_NS.isnan().tolist() == [[True, True, False], [False] * 3, [True, True, False]]
        assert out.mass_N.isnan().tolist() == [True, False, True]
        assert bool((out.logps_NS[:, 2] == -INF).all())
    weightless = product(backend, ids[1:2], logps[1:2], torch.tensor([NAN]), 2)
    assert bool(weightless.logps_NS.isnan().all())


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_and_strides(backend: str, dtype: torch.dtype, ids_dtype: torch.dtype) -> None:
    ids, logps, weights = random_case(9, 3, 12)
    ids, logps = ids.to(ids_dtype), logps.to(dtype)
    plain = check(backend, ids, logps, weights.to(dtype), 8)
    turned = [value.permute(2, 0, 1).contiguous().permute(1, 2, 0) for value in (ids, logps)]
    other = product(backend, *turned, weights.to(dtype).T.contiguous().T, 8)
    assert torch.equal(plain.ids_NS, other.ids_NS) and torch.equal(plain.logps_NS, other.logps_NS)
