"""The C++ backend's teacher_mixture: ids exactly as defined, log-probabilities against float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from smopd.kernels import cpp
from smopd.kernels.reference import topk as reference
from smopd.kernels.types import Mixture
from tests.kernels import cases
from tests.kernels.cpp import cpp_rows

cpp_rows.need_extension()
pytestmark = pytest.mark.usefixtures("poisoned_memory")

INF = math.inf
ATOL = 2e-6


def assert_mixture(ids_NMS: Tensor, logps_NMS: Tensor, log_alpha: Tensor, kappa: int, merge: bool) -> Mixture:
    got = cpp.teacher_mixture(ids_NMS, logps_NMS, log_alpha, kappa, merge=merge)
    same = reference.teacher_mixture(ids_NMS, logps_NMS.float(), log_alpha.float(), kappa, merge=merge)
    assert (got.ids_NS.dtype, got.logps_NS.dtype, got.mass_N.dtype) == (
        torch.int32,
        torch.float32,
        torch.float32,
    )
    torch.testing.assert_close(got.logps_NS, same.logps_NS, rtol=1e-6, atol=ATOL, equal_nan=True)
    torch.testing.assert_close(got.mass_N, same.mass_N, rtol=1e-6, atol=ATOL, equal_nan=True)
    assert torch.equal(got.ids_NS, same.ids_NS)
    return got


@pytest.mark.parametrize("merge", [True, False], ids=["merged", "pooled"])
@pytest.mark.parametrize("n_teachers", [1, 2, 4, 9])
@pytest.mark.parametrize("n_support", [1, 16, 64])
def test_equals_the_reference(n_support: int, n_teachers: int, merge: bool) -> None:
    """Up to 576 candidates, on both sides of where a sort takes over."""
    teachers = cpp_rows.random_teachers(30, 700, n_support, n_teachers)
    for kappa in (0, 1, n_support, n_support * n_teachers, n_support * n_teachers + 3):
        assert_mixture(*teachers, kappa, merge)


@pytest.mark.parametrize("merge", [True, False], ids=["merged", "pooled"])
@pytest.mark.parametrize("case", cases.SMALL, ids=str)
def test_equals_the_reference_at_the_shared_cases(case: cases.Case, merge: bool) -> None:
    """The teachers' log-probabilities in the case's dtype."""
    ids_NMS, logps_NMS, log_alpha_M = cpp_rows.random_teachers(case.N, case.V, case.kappa, case.M)
    assert_mixture(ids_NMS, logps_NMS.to(case.torch_dtype), log_alpha_M, case.kappa, merge)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_ties_and_empty_slots(data: st.DataObject) -> None:
    """Few ids and few values, so that most of the order is decided by ties."""
    n_rows, n_support = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 6))
    merge = data.draw(st.booleans())
    # A logsumexp of three may round a tie either way, one of two may not: two teachers of distinct ids.
    n_teachers = 2 if merge else data.draw(st.integers(1, 4))
    shape = (n_rows, n_teachers, n_support)
    values = st.sampled_from([-INF, 0.0, -0.5, -1.0, -1.5])

    def draw(strategy: st.SearchStrategy, *sizes: int) -> list:
        if not sizes:
            return data.draw(strategy)
        return [draw(strategy, *sizes[1:]) for _ in range(sizes[0])]

    logps_NMS = torch.tensor(draw(values, *shape))
    log_alpha_M = torch.tensor(draw(values, n_teachers))
    ids = draw(st.permutations(range(6)), n_rows, n_teachers) if merge else draw(st.integers(0, 5), *shape)
    ids_NMS = torch.tensor(ids, dtype=data.draw(st.sampled_from([torch.int32, torch.int64])))[..., :n_support]
    assert_mixture(
        ids_NMS, logps_NMS, log_alpha_M, data.draw(st.integers(0, n_teachers * n_support + 1)), merge
    )


def test_merged_is_the_logsumexp_in_float64() -> None:
    ids_NMS, logps_NMS, log_alpha = cpp_rows.random_teachers(50, 60, 16, 3)
    got = cpp.teacher_mixture(ids_NMS, logps_NMS, log_alpha, 48, merge=True)
    dense_NV = torch.zeros(50, 60, dtype=torch.float64)
    pooled_NMS = (logps_NMS.double() + log_alpha.double()[:, None]).exp()
    live_NMS = logps_NMS > -INF
    dense_NV.scatter_add_(-1, ids_NMS.masked_fill(~live_NMS, 0).flatten(1), pooled_NMS.flatten(1))
    kept_NS = got.logps_NS > -INF
    true_NS = dense_NV.gather(-1, got.ids_NS.long()).log()
    torch.testing.assert_close(got.logps_NS.double()[kept_NS], true_NS[kept_NS], rtol=1e-6, atol=ATOL)
    assert torch.equal(kept_NS.sum(-1), (dense_NV > 0).sum(-1))
    torch.testing.assert_close(got.mass_N.double(), dense_NV.sum(-1), rtol=1e-6, atol=ATOL)


def test_three_equal_pairs_are_ordered_by_id() -> None:
    """Every id's sum is made of the same two values, in either order."""
    ids_NMS = torch.tensor([[[8, 3, 5], [3, 5, 8]]])
    logps_NMS = torch.tensor([[[-1.0, -2.0, -1.0], [-1.0, -2.0, -2.0]]])
    got = assert_mixture(ids_NMS, logps_NMS, torch.zeros(2), 4, True)
    assert got.ids_NS.tolist() == [[3, 5, 8, 0]] and got.logps_NS[0, 0] == got.logps_NS[0, 2]


def test_broadcast_alpha_and_dtypes() -> None:
    ids_NMS, logps_NMS, log_alpha = cpp_rows.random_teachers(6, 90, 8)
    for alpha, dtype, merge in itertools.product(
        (log_alpha, log_alpha.expand(6, 2), log_alpha[:1], log_alpha.new_tensor([[-0.5]]), torch.randn(6, 1)),
        (torch.float32, torch.bfloat16),
        (True, False),
    ):
        assert_mixture(ids_NMS, logps_NMS.to(dtype), alpha, 8, merge)
    strided = (ids_NMS.mT.contiguous().mT, logps_NMS.repeat_interleave(2, -1)[..., ::2])
    plain = cpp.teacher_mixture(ids_NMS, logps_NMS, log_alpha, 8, merge=True)
    other = cpp.teacher_mixture(*strided, log_alpha, 8, merge=True)
    assert torch.equal(plain.ids_NS, other.ids_NS) and torch.equal(plain.logps_NS, other.logps_NS)


def uneven_teachers(n_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Lists that descend, that do not, with a NaN, with infinities and of nothing, by turns."""
    ids_NMS, logps_NMS, log_alpha_M = cpp_rows.random_teachers(n_rows, 300, 12, 3)
    logps_NMS = logps_NMS.clone()
    logps_NMS[1::7] = logps_NMS[1::7].flip(-1)
    logps_NMS[2::7, 1, 5:8] = logps_NMS[2::7, 1, 5:8].flip(-1)
    logps_NMS[3::7, 2, 4] = math.nan
    logps_NMS[4::7, 0, 0] = INF
    logps_NMS[5::7, 1, 3] = -INF
    logps_NMS[6::7, :2] = -INF
    return ids_NMS, logps_NMS, log_alpha_M


@pytest.mark.parametrize("n_rows", [1, 7, 8, 9, 50])
def test_a_row_depends_on_no_other(n_rows: int) -> None:
    ids_NMS, logps_NMS, log_alpha_M = uneven_teachers(n_rows)
    for kappa in (1, 12, 40):
        got = assert_mixture(ids_NMS, logps_NMS, log_alpha_M, kappa, False)
        for n in range(n_rows):
            alone = cpp.teacher_mixture(ids_NMS[n : n + 1], logps_NMS[n : n + 1], log_alpha_M, kappa)
            assert torch.equal(alone.ids_NS[0], got.ids_NS[n])
            torch.testing.assert_close(alone.logps_NS[0], got.logps_NS[n], rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(alone.mass_N[0], got.mass_N[n], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("n_teachers", [1, 2, 5])
@pytest.mark.parametrize("n_support", [1, 2, 9, 40])
def test_a_merge_of_sorted_lists_is_the_sort_of_all(n_support: int, n_teachers: int) -> None:
    """The same rows with one list turned round are sorted another way: to the same bits, without ties."""
    ids_NMS, logps_NMS, log_alpha_M = cpp_rows.random_teachers(37, 500, n_support, n_teachers)
    other = (ids_NMS.flip(-1), logps_NMS.flip(-1), log_alpha_M)
    for kappa in (n_support, n_support * n_teachers):
        merged, ranked = (
            cpp.teacher_mixture(ids_NMS, logps_NMS, log_alpha_M, kappa),
            cpp.teacher_mixture(*other, kappa),
        )
        for name in ("ids_NS", "logps_NS", "mass_N"):
            assert torch.equal(getattr(merged, name), getattr(ranked, name))


def test_ties_of_sorted_lists() -> None:
    """Rows of few values in descending order: the lower teacher first, then its own order."""
    gen = torch.Generator().manual_seed(0)
    logps_NMS = -torch.randint(4, (200, 4, 6), generator=gen).float().sort(-1).values
    logps_NMS[logps_NMS == -3.0] = -INF
    ids_NMS = torch.randint(-(2**40), 2**31 - 1, (200, 4, 6), generator=gen).clamp(min=-1)
    alphas = (torch.zeros(4), torch.tensor([0.0, -1.0, -INF, 0.0]), torch.tensor([0.0, INF, -1.0, 0.0]))
    for alpha, kappa in itertools.product(alphas, (1, 5, 24, 30)):
        assert_mixture(ids_NMS, logps_NMS, alpha, kappa, False)


def test_strides_of_sorted_lists() -> None:
    ids_NMS, logps_NMS, log_alpha = cpp_rows.random_teachers(19, 90, 8, 3)
    plain = cpp.teacher_mixture(ids_NMS, logps_NMS, log_alpha, 20)
    for ids, logps in (
        (ids_NMS.mT.contiguous().mT, logps_NMS.repeat_interleave(2, -1)[..., ::2]),
        (ids_NMS.transpose(0, 1).contiguous().transpose(0, 1), logps_NMS.mT.contiguous().mT),
        (ids_NMS.clamp(min=-1).int(), logps_NMS.transpose(0, 1).contiguous().transpose(0, 1)),
    ):
        other = cpp.teacher_mixture(ids, logps, log_alpha, 20)
        for name in ("ids_NS", "logps_NS", "mass_N"):
            assert torch.equal(getattr(plain, name), getattr(other, name))


@pytest.mark.parametrize("merge", [True, False], ids=["merged", "pooled"])
def test_mass_of_large_and_small_entries(merge: bool) -> None:
    values = torch.tensor(
        [INF, 1e30, 800.0, 200.5, 89.0, 88.0, 3.0, 0.0, -87.0, -100.0, -104.0, -745.0, -1e30]
    )
    ids_NMS = torch.zeros(len(values), 1, 1, dtype=torch.int32)
    got = cpp.teacher_mixture(ids_NMS, values[:, None, None], torch.zeros(1), 1, merge=merge)
    torch.testing.assert_close(got.mass_N, values.double().exp().float(), rtol=1e-6, atol=1e-45)


@pytest.mark.parametrize("merge", [True, False], ids=["merged", "pooled"])
def test_result_does_not_depend_on_threads(merge: bool) -> None:
    ids_NMS, logps_NMS, log_alpha_M = uneven_teachers(3001)
    teachers = (ids_NMS, logps_NMS.nan_to_num(), log_alpha_M)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = cpp.teacher_mixture(*teachers, 16, merge=merge)
        torch.set_num_threads(2)
        both = cpp.teacher_mixture(*teachers, 16, merge=merge)
    finally:
        torch.set_num_threads(threads)
    for name in ("ids_NS", "logps_NS", "mass_N"):
        assert torch.equal(getattr(alone, name), getattr(both, name))


def test_nan_comes_first_and_stays() -> None:
    ids_NMS = torch.tensor([[[4, 2], [2, 7]]])
    logps_NMS = torch.tensor([[[-1.0, math.nan], [-2.0, -0.5]]])
    for merge, first in ((True, [2, 7, 4, 0]), (False, [2, 7, 4, 2])):
        got = cpp.teacher_mixture(ids_NMS, logps_NMS, torch.zeros(2), 4, merge=merge)
        assert got.ids_NS.tolist() == [first] and got.logps_NS[0, 0].isnan() and got.mass_N.isnan().all()


def test_empty_shapes() -> None:
    for shape in ((0, 2, 4), (3, 2, 0)):
        got = cpp.teacher_mixture(
            torch.zeros(shape, dtype=torch.int64), torch.zeros(shape), torch.zeros(2), 5
        )
        assert got.ids_NS.shape == (shape[0], 5) and not got.ids_NS.any()
        assert bool((got.logps_NS == -INF).all()) and not got.mass_N.any()
