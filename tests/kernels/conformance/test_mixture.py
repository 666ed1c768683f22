"""teacher_mixture on every backend: the exact order, and log-probabilities against float64."""

import functools
import itertools
import math

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from bench.harness import objective
from smopd.kernels.reference import topk as reference
from smopd.kernels.types import Mixture
from tests.kernels import backends, cases

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # from numpy in the interpreter
INF, NAN = math.inf, math.nan
each_backend = backends.each("teacher_mixture")
merges = pytest.mark.parametrize("merge", [True, False], ids=["merged", "pooled"])
ATOL = {"reference": 2e-6, "cpp": 2e-6, "triton": 5e-6}
MASS = {name: {"rtol": 1e-6, "atol": 2e-6} for name in ("reference", "cpp")}
MASS["triton"] = {"rtol": 3e-5, "atol": 1e-30}
EXAMPLES = {"reference": 60, "cpp": 60, "triton": 12}
Teachers = tuple[Tensor, Tensor, Tensor]


def mixture(backend: str, ids: Tensor, logps: Tensor, log_alpha: Tensor, kappa: int, merge: bool) -> Mixture:
    return backends.call(backend, "teacher_mixture", ids, logps, log_alpha, kappa, merge=merge)


def check(backend: str, teachers: Teachers, kappa: int, merge: bool, *, near: bool = True) -> Mixture:
    """Compare the values with float64 and the order with the reference.

    near: allow any order of merged values that differ only by rounding.
    """
    ids, logps, log_alpha = teachers
    got = mixture(backend, *teachers, kappa, merge)
    true_NS = objective.mixture(ids.masked_fill(logps == -INF, 0), logps, log_alpha, kappa, merge)[1]
    true_NS = torch.nn.functional.pad(true_NS, (0, kappa - true_NS.shape[1]), value=-INF)
    assert got.ids_NS.dtype == torch.int32 and got.logps_NS.dtype == got.mass_N.dtype == torch.float32
    assert got.ids_NS.shape == got.logps_NS.shape == (len(ids), kappa)
    torch.testing.assert_close(got.logps_NS.double(), true_NS, rtol=1e-6, atol=ATOL[backend])
    torch.testing.assert_close(got.mass_N.double(), true_NS.exp().sum(-1), **MASS[backend])
    want = reference.teacher_mixture(ids, logps.float(), log_alpha.float(), kappa, merge=merge)
    same_NS = got.ids_NS == want.ids_NS
    if not merge:
        assert backends.same(got.logps_NS, want.logps_NS)  # a sum of two numbers, rounded once
    if merge and near:
        gap_NS = (want.logps_NS[:, 1:] - want.logps_NS[:, :-1]).abs().nan_to_num(0.0)
        edge_N1 = torch.full((len(ids), 1), INF)
        near_NS = torch.minimum(torch.cat([edge_N1, gap_NS], 1), torch.cat([gap_NS, edge_N1], 1)) < 1e-5
        near_NS[:, -1:] = True  # the first value that was cut may be near
        same_NS |= near_NS[:, :kappa]
    assert bool(same_NS.all()) and not got.ids_NS[got.logps_NS == -INF].any()
    return got


@each_backend
@merges
@pytest.mark.parametrize("n_teachers", [1, 2, 4, 9])
@pytest.mark.parametrize("n_support", [1, 16, 64])
def test_equals_float64(n_support: int, n_teachers: int, merge: bool, backend: str) -> None:
    """Up to 576 candidates, below and above the number from which C++ sorts."""
    backends.leave_to_a_gpu(backend, n_support * n_teachers > 200)
    ids, logps, log_alpha = cases.random_teachers(30, 700, n_support, n_teachers)
    rows = backends.rows_for(backend, 30)
    ids[rows[-1]] = ids[rows[-1]].flip(-1)  # a list that does not descend
    logps[rows[-1]] = logps[rows[-1]].flip(-1)
    kappas = {1, n_support, n_support * n_teachers + 3}
    if backends.interpreted(backend):
        kappas.discard(1)
    for place, kappa in enumerate(sorted(kappas)):
        dtype = cases.DTYPES[cases.HALF[place % 3]]
        check(backend, (ids[rows], logps[rows].to(dtype), log_alpha[rows]), kappa, merge)


@each_backend
def test_the_largest_pool(backend: str) -> None:
    """The most candidates for Triton, with kappas that are no powers of two."""
    ids, logps, log_alpha = cases.random_teachers(1, 384, 128, 8)
    for kappa in (100, 130):
        check(backend, (ids, logps, log_alpha), kappa, merge=kappa == 100)


@functools.cache
def drawn(merge: bool) -> st.SearchStrategy:
    """Return a strategy for teachers with many ties, kappa, and whether sums are exact."""

    @st.composite
    def teachers(draw) -> tuple:
        n_rows, n_support = draw(st.integers(1, 3)), draw(st.integers(0, 6))
        exact = draw(st.booleans())
        # A logsumexp of two is exact up to ties, one of three is not: two teachers of distinct ids.
        n_teachers = 2 if merge and exact else draw(st.integers(1, 4))
        shape = (n_rows, n_teachers, n_support)
        count = math.prod(shape)
        few = st.sampled_from([-INF, 0.0, -0.0, -0.5, -1.0, -1.5])
        value = few if exact else st.one_of(few, st.floats(-200, 0, width=32))
        logps = torch.tensor(draw(st.lists(value, min_size=count, max_size=count))).reshape(shape)
        log_alpha = torch.tensor(draw(st.lists(few, min_size=n_teachers, max_size=n_teachers)))
        if merge and exact:
            orders = [draw(st.permutations(range(7))) for _ in range(n_rows * n_teachers)]
            ids = torch.tensor(orders)[:, :n_support].reshape(shape)
        else:
            ids = torch.tensor(draw(st.lists(st.integers(0, 7), min_size=count, max_size=count))).reshape(
                shape
            )
        dtype = draw(st.sampled_from([torch.int32, torch.int64]))
        return (ids.to(dtype), logps.float(), log_alpha), draw(st.integers(0, 30)), exact

    return teachers()


@each_backend
@merges
def test_any_teachers(merge: bool, backend: str) -> None:
    backends.need(backend)
    few = backends.interpreted(backend)
    options = {"phases": [Phase.generate]} if few else {}  # shrinking takes the interpreter minutes

    @settings(
        max_examples=EXAMPLES[backend], deadline=None, suppress_health_check=[HealthCheck.too_slow], **options
    )
    @given(drawn(merge))
    def hold(case: tuple) -> None:
        teachers, kappa, exact = case
        check(backend, teachers, kappa, merge, near=not exact or backend == "triton")

    hold()


@each_backend
def test_ties(backend: str) -> None:
    ids, logps = torch.tensor([[[9, 3, 5], [1, 9, 0]]]), torch.full((1, 2, 3), -1.0)
    assert check(backend, (ids, logps, torch.zeros(2)), 5, False).ids_NS.tolist() == [[9, 3, 5, 1, 9]]
    got = check(backend, (ids, logps, torch.zeros(2)), 8, True, near=False)
    assert got.ids_NS.tolist() == [[9, 0, 1, 3, 5, 0, 0, 0]]
    want = torch.tensor([[-1.0 + math.log(2.0)] + [-1.0] * 4 + [-INF] * 3])
    torch.testing.assert_close(got.logps_NS, want)


@each_backend
@merges
def test_a_nan_comes_first_and_stays_in_its_row(merge: bool, backend: str) -> None:
    ids = torch.tensor([[[4, 2], [2, 7]], [[4, 2], [2, 7]]])
    logps = torch.tensor([[[-1.0, NAN], [-2.0, -0.5]], [[-1.0, -3.0], [-2.0, -0.5]]])
    got = mixture(backend, ids, logps, torch.zeros(2), 4, merge)
    assert got.ids_NS[0].tolist() == ([2, 7, 4, 0] if merge else [2, 7, 4, 2])
    assert got.logps_NS[0, 0].isnan() and got.mass_N.isnan().tolist() == [True, False]
    assert not got.logps_NS[1].isnan().any()


@each_backend
@merges
def test_log_alpha_broadcasts(merge: bool, backend: str) -> None:
    ids, logps, _ = cases.random_teachers(5, 90, 4, 3)
    for shape in ((3,), (1,), (5, 3), (5, 1), (1, 3), ()):
        log_alpha = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        check(backend, (ids, logps, log_alpha), 6, merge)


@each_backend
@merges
def test_strides_and_types(merge: bool, backend: str) -> None:
    backends.need(backend)
    to = backends.device(backend)
    ids, logps, log_alpha = backends.moved(cases.random_teachers(5, 90, 8, 3), to)
    logps = logps.bfloat16()
    ids = ids.clamp(min=0)
    want = mixture(backend, ids, logps.float(), log_alpha, 8, merge)
    for other_ids, other_logps in (
        (ids.mT.contiguous().mT, logps.repeat_interleave(2, -1)[..., ::2]),
        (ids.transpose(0, 1).contiguous().transpose(0, 1), logps.mT.contiguous().mT),
        (ids.int().repeat_interleave(2, 1)[:, ::2], logps.transpose(0, 1).contiguous().transpose(0, 1)),
    ):
        assert backends.same(mixture(backend, other_ids, other_logps, log_alpha.double(), 8, merge), want)


def uneven_teachers(n_rows: int) -> Teachers:
    """Return lists that descend or not, with NaN, with infinities, and empty ones, in turn."""
    ids, logps, log_alpha = cases.random_teachers(n_rows, 300, 12, 3)
    logps[1::7] = logps[1::7].flip(-1)
    logps[2::7, 1, 5:8] = logps[2::7, 1, 5:8].flip(-1)
    logps[3::7, 2, 4] = NAN
    logps[4::7, 0, 0] = INF
    logps[5::7, 1, 3] = -INF
    logps[6::7, :2] = -INF
    return ids.clamp(min=0), logps, log_alpha


@each_backend
@merges
def test_a_row_depends_on_no_other(merge: bool, backend: str) -> None:
    sizes = (9,) if backends.interpreted(backend) else (1, 7, 8, 9, 50)  # a program of Triton's has 8
    for n_rows, kappa in itertools.product(sizes, (12,) if backends.interpreted(backend) else (1, 12, 40)):
        teachers = uneven_teachers(n_rows)
        got = mixture(backend, *teachers, kappa, merge)
        assert backends.same(mixture(backend, *teachers, kappa, merge), got)
        for n in range(0, n_rows, 4 if backends.interpreted(backend) else 1):
            alone = mixture(backend, *(part[n : n + 1] for part in teachers), kappa, merge)
            assert backends.same(
                alone, Mixture(*(part[n : n + 1] for part in (got.ids_NS, got.logps_NS, got.mass_N)))
            )


@backends.each("teacher_mixture", but=("reference", "triton"))
@merges
def test_bits_do_not_depend_on_threads(merge: bool, backend: str, each_number_of_threads) -> None:
    ids, logps, log_alpha = uneven_teachers(3001)
    teachers = (ids, logps.nan_to_num(), log_alpha)
    results = each_number_of_threads(lambda: mixture(backend, *teachers, 16, merge))
    assert all(backends.same(result, results[0]) for result in results)


@each_backend
@merges
@pytest.mark.parametrize("shape", [(0, 2, 3), (2, 2, 0), (2, 0, 3)], ids=str)
def test_nothing_to_mix(shape: tuple[int, int, int], merge: bool, backend: str) -> None:
    got = mixture(backend, torch.zeros(shape).long(), torch.zeros(shape), torch.zeros(shape[1]), 4, merge)
    assert got.ids_NS.shape == (shape[0], 4) and not got.ids_NS.any() and not got.mass_N.any()
    assert bool((got.logps_NS == -INF).all())
