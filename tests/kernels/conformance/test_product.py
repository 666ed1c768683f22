"""teacher_product on every backend against dictionaries in float64, whatever repeats, ties or is missing."""

from __future__ import annotations

import importlib
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from smopd.kernels.dispatch import MODULES
from smopd.ops import Mixture, teacher_product

INF, NAN = math.inf, math.nan
BACKENDS = [name for name in ("reference", "cpp", "triton") if "teacher_product" in MODULES[name]]
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5}  # nats, of log-probabilities of about -20

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Serves every call; where it is triton, natively on a GPU and elsewhere in the interpreter."""
    if request.param == "triton":
        importlib.import_module("tests.kernels.triton.device")
    monkeypatch.setenv("SMOPD_BACKEND", request.param)
    return request.param


def product(backend: str, ids: Tensor, logps: Tensor, weights: Tensor, kappa: int, **options) -> Mixture:
    on_gpu = backend == "triton" and torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    out = teacher_product(ids.to(device), logps.to(device), weights.to(device), kappa, **options)
    return Mixture(out.ids_NS.cpu(), out.logps_NS.cpu(), out.mass_N.cpu())


def logsumexp(values: list[float]) -> float:
    peak = max(values, default=-INF)
    if peak == -INF or any(value != value for value in values):
        return sum(values, peak) if values else -INF
    return peak + math.log(sum(math.exp(value - peak) for value in values))


def truth(ids: Tensor, logps: Tensor, weights: Tensor, reference=-1, clip=None, keep_raised=None):
    """Each row's product as a dictionary, from id to log-probability, before the cut."""
    n_rows, n_models, _ = ids.shape
    weights = weights.double().expand(n_rows, n_models - 1)
    rows = []
    for n in range(n_rows):
        said: list[dict[int, float]] = []
        for m in range(n_models):
            lists: dict[int, list[float]] = {}
            for token, logp in zip(ids[n, m].tolist(), logps[n, m].double().tolist(), strict=True):
                if logp != -INF:
                    lists.setdefault(token, []).append(logp)
            said.append({token: logsumexp(found) for token, found in lists.items()})
        base = said.pop(reference)
        row = {}
        for token, logp in base.items():
            if all(token in model for model in said):
                changes = []
                for weight, model in zip(weights[n].tolist(), said, strict=True):
                    change = model[token] - logp
                    if clip is not None and change == change:
                        change = min(max(change, -clip), clip)
                    changes.append(weight * change)
                if keep_raised is not None and any(change > keep_raised for change in changes):
                    changes = [max(change, 0.0) if change == change else change for change in changes]
                row[token] = logp + sum(changes)
        total = logsumexp(list(row.values()))
        rows.append({token: value - total for token, value in row.items()})
    return rows


def check(backend: str, ids: Tensor, logps: Tensor, weights: Tensor, kappa: int, **options) -> Mixture:
    got = product(backend, ids, logps, weights, kappa, **options)
    dtype = torch.float64 if logps.dtype == torch.float64 else torch.float32
    slack = TOLERANCE[dtype]
    assert got.ids_NS.shape == got.logps_NS.shape == (ids.shape[0], kappa)
    assert got.ids_NS.dtype == torch.int32 and got.logps_NS.dtype == got.mass_N.dtype == dtype
    rows = truth(ids, logps, weights, **options)
    found = (got.ids_NS.tolist(), got.logps_NS.tolist(), got.mass_N.tolist())
    for got_ids, got_logps, mass, row in zip(*found, rows, strict=True):
        wanted = sorted(row.items(), key=lambda entry: (-entry[1], entry[0]))[:kappa]
        n_live = len(wanted)
        assert got_logps[:n_live] == pytest.approx([value for _, value in wanted], rel=slack, abs=slack)
        assert got_logps[n_live:] == [-INF] * (kappa - n_live) and got_ids[n_live:] == [0] * (kappa - n_live)
        assert mass == pytest.approx(sum(math.exp(value) for _, value in wanted), abs=10 * slack)
        # Each id has its own value, and stands once; the order is that of the values, ties by id.
        assert len(set(got_ids[:n_live])) == n_live
        for token, value in zip(got_ids[:n_live], got_logps, strict=False):
            assert value == pytest.approx(row[token], rel=slack, abs=slack)
        pairs = [(-value, token) for token, value in zip(got_ids[:n_live], got_logps, strict=False)]
        assert pairs == sorted(pairs)
    return got


def random_case(n_rows: int, n_models: int, n_support: int, seed: int = 0, by_row: bool = True):
    """A union: every model gives most of the ids, each in an order of its own; some slots are empty."""
    gen = torch.Generator().manual_seed(seed)
    order = torch.rand(n_rows, n_models, n_support, generator=gen).argsort(-1)
    base = torch.randint(0, 50_000, (n_rows, 1, 1), generator=gen)
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
def test_against_float64(
    backend: str, n_rows: int, n_models: int, n_support: int, kappa: int, options
) -> None:
    for by_row in (True, False):
        check(backend, *random_case(n_rows, n_models, n_support, by_row=by_row), kappa, **options)


@st.composite
def cases(draw):
    """Few ids, so that they repeat, tie and miss; slots may be empty or hold -0.0."""
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


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases())
def test_any_lists(backend: str, drawn) -> None:
    case, kappa, options = drawn
    check(backend, *case, kappa, **options)


def test_float64_is_served_by_the_reference() -> None:
    ids, logps, weights = random_case(5, 3, 24)
    check("reference", ids, logps.double(), weights.double(), 16, clip=2.0)


def test_the_whole_vocabulary_is_the_tilted_reference(backend: str) -> None:
    p = torch.randn(4, 3, 33, generator=torch.Generator().manual_seed(1), dtype=torch.float64).softmax(-1)
    ids, weights = torch.arange(33).expand(4, 3, 33), torch.tensor([1.0, 0.4])
    tilted = p[:, 2] * (p[:, 0] / p[:, 2]) * (p[:, 1] / p[:, 2]) ** 0.4
    exact = tilted / tilted.sum(-1, keepdim=True)
    out = product(backend, ids, p.log().float(), weights, 33)
    torch.testing.assert_close(
        out.logps_NS.exp().double(), exact.gather(1, out.ids_NS.long()), rtol=1e-5, atol=0
    )
    torch.testing.assert_close(out.mass_N, torch.ones(4))


def test_a_raise_is_kept_from_the_others(backend: str) -> None:
    """Of id 0 the first teacher adds log 2, the second takes log 4; of id 1 both take."""
    base = torch.tensor([0.2, 0.4, 0.4])
    said = torch.stack([base * torch.tensor([2.0, 0.5, 1.0]), base * torch.tensor([0.25, 0.5, 1.0]), base])
    ids = torch.arange(3).expand(1, 3, 3)
    for keep_raised, first in ((None, 0.1), (0.0, 0.4), (0.6, 0.4), (0.8, 0.1)):
        out = product(backend, ids, said[None].log(), torch.ones(2), 3, keep_raised=keep_raised)
        kept = dict(zip(out.ids_NS[0].tolist(), out.logps_NS[0].exp().tolist(), strict=True))
        total = first + 0.1 + 0.4
        assert kept == pytest.approx({0: first / total, 1: 0.1 / total, 2: 0.4 / total}, rel=1e-5)
    switched_off = product(backend, ids, said[None].log(), torch.tensor([0.0, 1.0]), 3, keep_raised=0.0)
    assert switched_off.ids_NS.tolist() == [[2, 1, 0]]


def test_an_id_that_one_does_not_give_is_off_the_support(backend: str) -> None:
    ids = torch.tensor([[[7, 5, 9], [9, 7, -3]], [[1, 2, 3], [4, 5, 6]]])
    logps = torch.tensor([[[-1.0, -0.5, -2.0], [-1.0, -1.0, -INF]], [[-1.0] * 3, [-1.0] * 3]])
    out = product(backend, ids, logps, torch.ones(1), 4)
    assert out.ids_NS.tolist() == [[7, 9, 0, 0], [0] * 4]
    total = math.log(math.exp(-1.0) + math.exp(-2.0))
    expected = torch.tensor([[-1.0 - total, -2.0 - total, -INF, -INF], [-INF] * 4])
    torch.testing.assert_close(out.logps_NS, expected)
    torch.testing.assert_close(out.mass_N, torch.tensor([1.0, 0.0]))


def test_weight_zero_leaves_the_change_out_and_the_ids_in(backend: str) -> None:
    ids = torch.tensor([[[1, 2], [1, 3], [1, 2]]])
    logps = torch.tensor([[[-0.1, -3.0], [-2.0, -0.2], [-0.7, -0.7]]])
    out = product(backend, ids, logps, torch.tensor([1.0, 0.0]), 2)
    assert out.ids_NS.tolist() == [[1, 0]] and out.logps_NS.tolist() == [[0.0, -INF]]


def test_ties_go_to_the_lower_id_and_the_cut_takes_them_in_order(backend: str) -> None:
    ids = torch.tensor([[[9, 3, 5, 8], [8, 9, 5, 3]]])
    out = product(backend, ids, torch.full((1, 2, 4), -1.5), torch.ones(1), 3)
    assert out.ids_NS.tolist() == [[3, 5, 8]]
    torch.testing.assert_close(out.logps_NS, torch.full((1, 3), -math.log(4.0)))
    torch.testing.assert_close(out.mass_N, torch.tensor([0.75]))


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


def test_tiny_probabilities_and_large_changes(backend: str) -> None:
    ids = torch.arange(4).expand(1, 2, 4)
    logps = torch.tensor([[[-300.0, -1e-6, -87.0, -104.0], [-301.0, -90.0, -0.5, -1000.0]]])
    check(backend, ids, logps, torch.tensor([1.0]), 4)
    check(backend, ids, logps, torch.tensor([3.0]), 4)
    check(backend, ids, logps, torch.tensor([-2.0]), 4, clip=50.0)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_and_strides(backend: str, dtype: torch.dtype, ids_dtype: torch.dtype) -> None:
    ids, logps, weights = random_case(9, 3, 12)
    ids, logps = ids.to(ids_dtype), logps.to(dtype)
    plain = check(backend, ids, logps, weights.to(dtype), 8)
    turned = [value.permute(2, 0, 1).contiguous().permute(1, 2, 0) for value in (ids, logps)]
    other = product(backend, *turned, weights.to(dtype).T.contiguous().T, 8)
    assert torch.equal(plain.ids_NS, other.ids_NS) and torch.equal(plain.logps_NS, other.logps_NS)


@pytest.mark.parametrize("shape", [(2,), (1, 2), (4, 1), (4, 2), (1,), ()], ids=str)
def test_weights_broadcast(backend: str, shape: tuple[int, ...]) -> None:
    ids, logps, _ = random_case(4, 3, 8)
    check(backend, ids, logps, torch.rand(shape, generator=torch.Generator().manual_seed(2)), 6)


@pytest.mark.parametrize("shape", [(0, 2, 3), (3, 2, 0), (2, 1, 5)], ids=str)
def test_nothing_to_do(backend: str, shape: tuple[int, ...]) -> None:
    """No rows, no slots; the reference alone is itself."""
    ids = torch.arange(shape[2]).expand(shape)
    logps = torch.full(shape, -1.0).log_softmax(-1)
    for kappa in (0, 5):
        out = check(backend, ids, logps, torch.ones(shape[1] - 1), kappa)
        assert out.ids_NS.shape == (shape[0], kappa) and out.mass_N.shape == (shape[0],)


IDS, LOGPS, WEIGHTS = random_case(4, 3, 5, by_row=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": IDS[0]}, r"ids_NMS has shape \(3, 5\), expected \(N, M, S\)"),
        ({"ids": IDS.float()}, "ids_NMS has dtype float32, expected int32 or int64"),
        ({"logps": LOGPS[:3]}, r"logps_NMS has shape \(3, 3, 5\), expected \(4, 3, 5\) to match ids_NMS"),
        ({"ids": IDS[:, :0], "logps": LOGPS[:, :0]}, r"shape \(4, 0, 5\), expected the reference among M"),
        (
            {"weights": torch.ones(3)},
            r"weights has shape \(3,\), expected \(M - 1,\), \(N, M - 1\) or what broadcasts to \(4, 2\), to "
            r"match ids_NMS \(4, 3, 5\)",
        ),
        ({"weights": torch.ones(2, dtype=torch.int64)}, "weights has dtype torch.int64, expected float64"),
        ({"kappa": -1}, "kappa is -1, expected an integer of at least 0"),
        ({"reference": 3}, "reference is 3, expected an integer of -3 to 2"),
        ({"reference": True}, "reference is True, expected an integer of -3 to 2"),
        ({"clip": 0.0}, r"clip is 0\.0, expected None or a finite number above 0"),
        ({"clip": NAN}, "clip is nan, expected None or a finite number above 0"),
        ({"keep_raised": -0.1}, r"keep_raised is -0\.1, expected None or a finite number of at least 0"),
    ],
)
def test_arguments_that_are_refused(change: dict, message: str) -> None:
    given = {"ids": IDS, "logps": LOGPS, "weights": WEIGHTS, "kappa": 4} | change
    values = [given.pop(name) for name in ("ids", "logps", "weights", "kappa")]
    with pytest.raises(ValueError, match=f"^teacher_product: .*{message}"):
        teacher_product(*values, **given)


def test_values_are_looked_at_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMOPD_DEBUG", "1")
    with pytest.raises(ValueError, match="weights holds 1 bad values, expected finite values"):
        teacher_product(IDS, LOGPS.log_softmax(-1), torch.tensor([1.0, -INF]), 4)
