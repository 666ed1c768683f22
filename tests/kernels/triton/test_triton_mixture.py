"""The Triton teacher_mixture against the reference: the order exactly, whatever ties, repeats, empty slots.

Natively on a GPU; in Triton's interpreter where there is none.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.triton.device import DEVICE, gpu, needs_cuda

# isort: split
from smopd.kernels.reference import topk as reference
from smopd.kernels.triton import mixture as triton_mixture
from smopd.kernels.types import Mixture
from tests.kernels import cases as shared

INF = math.inf
MERGE = pytest.mark.parametrize("merge", [False, True], ids=["pooled", "merged"])

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.usefixtures("poisoned_outputs"),
]


def mixture(ids: Tensor, logps: Tensor, log_alpha: Tensor, kappa: int, merge: bool) -> Mixture:
    tensors = (ids.to(DEVICE), logps.to(DEVICE), log_alpha.to(DEVICE))
    out = triton_mixture.teacher_mixture(*tensors, kappa, merge=merge)
    return Mixture(out.ids_NS.cpu(), out.logps_NS.cpu(), out.mass_N.cpu())


def check(ids: Tensor, logps: Tensor, log_alpha: Tensor, kappa: int, merge: bool) -> Mixture:
    """Pooled: the reference's bits, but for the mass. Merged: its values; its ids where they do not tie."""
    got = mixture(ids, logps, log_alpha, kappa, merge)
    want = reference.teacher_mixture(ids, logps, log_alpha, kappa, merge=merge)
    assert got.ids_NS.dtype == torch.int32 and got.logps_NS.dtype == torch.float32
    torch.testing.assert_close(got.logps_NS, want.logps_NS, rtol=1e-6, atol=5e-6 if merge else 0.0)
    torch.testing.assert_close(got.mass_N, want.mass_N, rtol=3e-5, atol=1e-30)
    true = reference.teacher_mixture(ids, logps.double(), log_alpha.double(), kappa, merge=merge)
    torch.testing.assert_close(got.logps_NS.double(), true.logps_NS, rtol=1e-6, atol=5e-6)
    torch.testing.assert_close(got.mass_N.double(), true.mass_N, rtol=3e-5, atol=1e-30)
    if merge:
        gap_NS = (want.logps_NS[:, 1:] - want.logps_NS[:, :-1]).abs().nan_to_num(0.0)
        edge_N1 = torch.full((ids.shape[0], 1), INF)
        near_NS = torch.minimum(torch.cat([edge_N1, gap_NS], 1), torch.cat([gap_NS, edge_N1], 1)) < 1e-5
        near_NS[:, -1:] = True  # the next one, cut off, may be near
        equal_NS = (got.ids_NS == want.ids_NS) | near_NS[:, :kappa]
        assert bool(equal_NS.all())
        assert not got.ids_NS[got.logps_NS == -INF].any()
    else:
        assert torch.equal(got.ids_NS, want.ids_NS)
    return got


def random_case(n_rows: int, n_teachers: int, n_support: int, seed: int = 0, n_vocab: int = 40):
    gen = torch.Generator().manual_seed(seed)
    shape = (n_rows, n_teachers, n_support)
    ids = torch.randint(0, n_vocab, shape, generator=gen)
    logps = 4.0 * torch.randn(shape, generator=gen) - 6.0
    logps[torch.rand(shape, generator=gen) < 0.1] = -INF
    return ids, logps, torch.randn(n_rows, n_teachers, generator=gen)


@MERGE
@pytest.mark.parametrize(
    ("n_rows", "n_teachers", "n_support", "kappa"),
    [(1, 1, 1, 1), (3, 2, 16, 16), (35, 3, 5, 7), (2, 5, 20, 100), (2, 4, 20, 130), (1, 8, 128, 128)],
    ids=lambda value: str(value),
)
def test_against_the_reference(n_rows, n_teachers, n_support, kappa: int, merge: bool) -> None:
    check(*random_case(n_rows, n_teachers, n_support, n_vocab=3 * n_support), kappa, merge)


@MERGE
@pytest.mark.parametrize("case", shared.INTERPRETED, ids=str)
def test_shared_cases(case: shared.Case, merge: bool) -> None:
    """The teachers' log-probabilities in the case's dtype, their ids up to V - 1."""
    n_known = min(case.V, 2000)
    ids, logps, log_alpha = random_case(case.N, case.M, case.kappa, n_vocab=n_known)
    ids = case.V - 1 - (n_known - 1 - ids) * (case.V // n_known)
    check(ids, logps.to(case.torch_dtype).float(), log_alpha, case.kappa, merge)


@st.composite
def cases(draw):
    n_rows, n_teachers, n_support = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(0, 6))
    count = n_rows * n_teachers * n_support
    ids = draw(st.lists(st.integers(0, 7), min_size=count, max_size=count))
    value = st.one_of(st.just(-INF), st.floats(-200, 0, width=32), st.sampled_from([-1.0, -2.0, -0.0, 0.0]))
    logps = draw(st.lists(value, min_size=count, max_size=count))
    alpha = draw(st.lists(st.sampled_from([-INF, -1.0, -0.5, 0.0]), min_size=n_teachers, max_size=n_teachers))
    shape = (n_rows, n_teachers, n_support)
    return (
        torch.tensor(ids, dtype=torch.int64).reshape(shape),
        torch.tensor(logps, dtype=torch.float32).reshape(shape),
        torch.tensor(alpha, dtype=torch.float32),
    )


@settings(max_examples=25, deadline=None)
@given(cases(), st.integers(0, 30))
def test_any_pool(case, kappa: int) -> None:
    check(*case, kappa, merge=False)


@settings(max_examples=15, deadline=None)
@given(cases(), st.integers(0, 30))
def test_any_merge(case, kappa: int) -> None:
    check(*case, kappa, merge=True)


def test_ties_pooled_go_to_the_lower_teacher_and_then_to_its_order() -> None:
    ids = torch.tensor([[[9, 3, 5], [1, 9, 0]]])
    got = check(ids, torch.full((1, 2, 3), -1.0), torch.zeros(2), 5, merge=False)
    assert got.ids_NS.tolist() == [[9, 3, 5, 1, 9]]


def test_ties_merged_go_to_the_lower_id() -> None:
    ids = torch.tensor([[[9, 3, 5], [1, 9, 0]]])
    got = mixture(ids, torch.full((1, 2, 3), -1.0), torch.zeros(2), 8, merge=True)
    assert got.ids_NS.tolist() == [[9, 0, 1, 3, 5, 0, 0, 0]]
    expected = torch.tensor([[-1.0 + math.log(2.0)] + [-1.0] * 4 + [-INF] * 3])
    torch.testing.assert_close(got.logps_NS, expected)


def test_long_runs_and_the_largest_id_are_merged() -> None:
    """One id in every slot, or the ends of int32; sums as accurate far below 0."""
    ids = torch.stack([torch.full((3, 40), 2**31 - 1), torch.tensor([0, 2**31 - 1]).repeat(60).view(3, 40)])
    logps = torch.full((2, 3, 40), -150.0)
    got = mixture(ids, logps, torch.zeros(3), 2, merge=True)
    assert got.ids_NS.tolist() == [[2**31 - 1, 0], [0, 2**31 - 1]]
    expected = torch.tensor([[math.log(120.0) - 150.0, -INF], [math.log(60.0) - 150.0] * 2])
    torch.testing.assert_close(got.logps_NS, expected, rtol=1e-6, atol=0.0)


@MERGE
def test_a_nan_comes_first_and_stays_in_its_row(merge: bool) -> None:
    ids, logps, log_alpha = random_case(2, 2, 8)
    logps[0, 1, 3] = math.nan
    got = mixture(ids, logps, log_alpha, 4, merge)
    assert got.logps_NS[0, 0].isnan() and got.mass_N[0].isnan()
    assert int(got.ids_NS[0, 0]) == int(ids[0, 1, 3])
    assert not got.logps_NS[1].isnan().any() and not got.mass_N[1].isnan()


@MERGE
@pytest.mark.parametrize("shape", [(3,), (1,), (5, 3), (5, 1), (1, 3), ()], ids=str)
def test_log_alpha_broadcasts(shape: tuple[int, ...], merge: bool) -> None:
    ids, logps, _ = random_case(5, 3, 4)
    check(ids, logps, torch.randn(shape, generator=torch.Generator().manual_seed(1)), 6, merge)


def test_dtypes_and_strides() -> None:
    ids, logps, log_alpha = random_case(3, 2, 10)
    want = mixture(ids, logps.bfloat16().float(), log_alpha, 8, merge=False)
    wide_ids = torch.full((3, 4, 20), -1, dtype=torch.int32)
    wide_ids[:, ::2, ::2] = ids.int()
    wide_logps = torch.zeros(2, 10, 3, dtype=torch.bfloat16)
    wide_logps[:] = logps.bfloat16().permute(1, 2, 0)
    tensors = (wide_ids.to(DEVICE)[:, ::2, ::2], wide_logps.to(DEVICE).permute(2, 0, 1))
    got = triton_mixture.teacher_mixture(*tensors, log_alpha.double().to(DEVICE), 8)
    assert torch.equal(got.ids_NS.cpu(), want.ids_NS) and torch.equal(got.logps_NS.cpu(), want.logps_NS)


@MERGE
def test_teachers_further_apart_than_32_bits_reach(merge: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":  # the interpreter copies each storage onto itself, and would touch all of it
        monkeypatch.setattr("triton.runtime.interpreter.GridExecutor._restore_args_dev", lambda *_: None)
    ids, logps, log_alpha = random_case(5, 3, 4)
    far = 2**30 + 8  # elements from one teacher to the next; what lies between is never touched

    def far_apart(values: Tensor) -> Tensor:
        return values.to(DEVICE).new_empty(3 * far).as_strided(values.shape, (4, far, 1)).copy_(values)

    far_ids, far_logps = far_apart(ids.to(torch.int8)), far_apart(logps.half())
    got = triton_mixture.teacher_mixture(far_ids, far_logps, log_alpha.to(DEVICE), 6, merge=merge)
    near = mixture(far_ids.contiguous(), far_logps.contiguous(), log_alpha, 6, merge)
    for name in ("ids_NS", "logps_NS", "mass_N"):
        assert torch.equal(getattr(got, name).cpu(), getattr(near, name)), name


@MERGE
def test_repeated_and_alone_bitwise_equal(merge: bool) -> None:
    ids, logps, log_alpha = random_case(20, 2, 16)
    first, again = (mixture(ids, logps, log_alpha, 16, merge) for _ in range(2))
    alone = mixture(ids[17:18], logps[17:18], log_alpha[17:18], 16, merge)
    for name in ("ids_NS", "logps_NS", "mass_N"):
        assert torch.equal(getattr(first, name), getattr(again, name))
        assert torch.equal(getattr(first, name)[17:18], getattr(alone, name))


def test_empty_shapes() -> None:
    for shape, kappa in (((0, 2, 3), 4), ((2, 2, 0), 4), ((2, 0, 3), 4), ((2, 2, 3), 0)):
        log_alpha = torch.zeros(shape[1])
        got = mixture(torch.zeros(shape, dtype=torch.int64), torch.zeros(shape), log_alpha, kappa, merge=True)
        assert got.ids_NS.shape == got.logps_NS.shape == (shape[0], kappa)
        assert not got.ids_NS.any() and not got.mass_N.any() and bool((got.logps_NS == -INF).all())


def test_what_is_not_served_is_said() -> None:
    ids, logps = torch.zeros(1, 8, 129, dtype=torch.int64), torch.zeros(1, 8, 129)
    assert triton_mixture.unserved("teacher_mixture", logps, n_pooled=ids[0, :, :128].numel()) is None
    assert "float64" in str(triton_mixture.unserved("teacher_mixture", logps.double(), n_pooled=8))
    with pytest.raises(ValueError, match=r"teacher_mixture: M \* S is 1032, expected at most 1024"):
        mixture(ids, logps, torch.zeros(8), 4, merge=True)


@gpu
@needs_cuda
@MERGE
@pytest.mark.parametrize("n_teachers", [2, 4, 8])
@pytest.mark.parametrize("kappa", [16, 64, 128])
def test_large_on_the_gpu(n_teachers: int, kappa: int, merge: bool) -> None:
    case = random_case(4097, n_teachers, kappa, n_vocab=4 * kappa)
    first = check(*case, kappa, merge)
    again = mixture(*case, kappa, merge)
    assert torch.equal(first.logps_NS, again.logps_NS) and torch.equal(first.ids_NS, again.ids_NS)


@gpu
@needs_cuda
def test_captured_in_a_graph() -> None:
    case = [tensor.to(DEVICE) for tensor in random_case(100, 2, 16)]
    want = triton_mixture.teacher_mixture(*case, 16, merge=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = triton_mixture.teacher_mixture(*case, 16, merge=True)
    graph.replay()
    assert torch.equal(got.ids_NS, want.ids_NS) and torch.equal(got.logps_NS, want.logps_NS)
