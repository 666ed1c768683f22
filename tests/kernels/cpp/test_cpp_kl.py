"""The C++ backend's forward KL and its gradient against the reference in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from smopd.kernels import cpp
from smopd.kernels.reference import topk as reference
from smopd.kernels.types import Candidates, KlOptions, SparseTarget
from tests.kernels import cases, float64
from tests.kernels.cpp import cpp_rows
from tests.kernels.cpp.cpp_rows import TERM_TOLERANCE

cpp_rows.need_extension()
pytestmark = pytest.mark.usefixtures("poisoned_memory")

COMBINATIONS = list(itertools.product((True, False), (True, False), (1.0, 0.7)))


def wide_target(target: SparseTarget | Candidates) -> SparseTarget | Candidates:
    if isinstance(target, SparseTarget):
        return SparseTarget(target.ids_NS, target.logps_NS.double())
    return Candidates(
        target.ids_NMS, target.logps_NMS.double(), target.log_alpha.double(), target.kappa, target.merge
    )


def slopes(n_rows: int, seed: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dlogp_N, dkl_N = torch.randn(n_rows, generator=generator), torch.randn(n_rows, generator=generator)
    dkl_N[1::4] = 0.0
    return dlogp_N, dkl_N


def assert_forward_kl(
    logits_NV: Tensor,
    token_ids_N: Tensor,
    target: SparseTarget | Candidates,
    *,
    tail: bool,
    temperature: float,
) -> None:
    options = KlOptions(tail=tail, temperature=temperature)
    logp_N, kl_N = cpp.forward_kl_rows(logits_NV, token_ids_N, target, options)
    wide = wide_target(target)
    for value_N, true_N in zip(
        (logp_N, kl_N),
        reference.forward_kl_rows(logits_NV.double(), token_ids_N, wide, options),
        strict=True,
    ):
        assert value_N.dtype == torch.float32
        torch.testing.assert_close(value_N.double(), true_N, rtol=2e-6, atol=TERM_TOLERANCE, equal_nan=True)
    dlogp_N, dkl_N = slopes(logits_NV.shape[0])
    for dlogp, dkl in ((dlogp_N, dkl_N), (dlogp_N, None), (None, dkl_N)):
        pair = {"dlogp_N": dlogp, "dkl_N": dkl}
        grad_NV = cpp.forward_kl_gradient(logits_NV, token_ids_N, target, options, **pair)
        wide_pair = {name: None if value is None else value.double() for name, value in pair.items()}
        true_NV = reference.forward_kl_gradient(logits_NV.double(), token_ids_N, wide, options, **wide_pair)
        assert grad_NV.dtype == logits_NV.dtype
        pull_N = dlogp_N.double().abs() if dlogp is not None else torch.zeros(len(dkl_N), dtype=torch.float64)
        magnitude_NV = cpp_rows.magnitude(
            logits_NV,
            token_ids_N,
            wide,
            tail=tail,
            temperatures=(temperature, temperature),
            coef_N=(pull_N + (0.0 if dkl is None else dkl_N.double().abs())) / temperature,
            pull_N=pull_N / temperature,
        )
        cpp_rows.assert_gradient(grad_NV, true_NV, magnitude_NV)


@pytest.mark.parametrize("kind", ["given", "teachers"])
@pytest.mark.parametrize("case", cases.SMALL, ids=str)
def test_equals_float64(case: cases.Case, kind: str) -> None:
    logits_NV = cpp_rows.random_logits(case.N, case.V, case.torch_dtype)
    for tail, merge, temperature in COMBINATIONS:
        target = cpp_rows.target_of(kind, case.N, case.V, case.kappa, merge, case.M)
        assert target is not None
        token_ids_N = cpp_rows.random_tokens(logits_NV, target).token_ids_N
        assert_forward_kl(logits_NV, token_ids_N, target, tail=tail, temperature=temperature)


@pytest.mark.parametrize("case", cases.FULL, ids=str)
def test_many_rows_of_the_full_vocabulary_equal_float64(case: cases.Case) -> None:
    """All rows at once; what is compared are rows from the first to the last."""
    logits_NV = cpp_rows.random_logits(case.N, case.V, case.torch_dtype)
    target = cpp_rows.target_of("teachers", case.N, case.V, case.kappa, True, case.M)
    assert isinstance(target, Candidates)
    token_ids_N = cpp_rows.random_tokens(logits_NV, target).token_ids_N
    rows = float64.some_rows(case.N)
    few_NV, few_ids_N = logits_NV[rows], token_ids_N[rows]
    few = Candidates(
        target.ids_NMS[rows], target.logps_NMS[rows], target.log_alpha, target.kappa, target.merge
    )
    options = KlOptions(tail=True, temperature=1.0)
    many = cpp.forward_kl_rows(logits_NV, token_ids_N, target, options)
    for all_N, few_N in zip(many, cpp.forward_kl_rows(few_NV, few_ids_N, few, options), strict=True):
        assert torch.equal(all_N[rows], few_N)
    dlogp_N, dkl_N = slopes(case.N)
    pair, few_pair = ({"dlogp_N": dlogp_N[at], "dkl_N": dkl_N[at]} for at in (slice(None), rows))
    many_NV = cpp.forward_kl_gradient(logits_NV, token_ids_N, target, options, **pair)
    few_grad_NV = cpp.forward_kl_gradient(few_NV, few_ids_N, few, options, **few_pair)
    assert torch.equal(many_NV[rows], few_grad_NV)
    assert_forward_kl(few_NV, few_ids_N, few, tail=True, temperature=1.0)


@pytest.mark.parametrize("tail", [True, False], ids=["tail", "no tail"])
def test_repeats_and_empty_slots(tail: bool) -> None:
    """Repeats of one id, a row of empty slots, a whole-vocabulary support, a mass of 1 and one above 1."""
    logits_NV = cpp_rows.random_logits(5, 6, torch.float32)
    logps_NS = torch.tensor(
        [
            [0.3, 0.2, 0.1, 0.1, 0.05, 0.0],
            [0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
            [0.1, 0.2, 0.1, 0.1, 0.1, 0.1],
            [0.5, 0.25, 0.125, 0.125, 0.0, 0.0],
            [0.6, 0.6, 0.0, 0.0, 0.0, 0.0],
        ]
    ).log()
    ids_NS = torch.tensor(
        [
            [3, 3, 0, 3, 1, -7],
            [9, 9, 9, 9, 9, 9],
            [5, 4, 3, 2, 1, 0],
            [0, 1, 2, 0, 99, 99],
            [2, 1, 7, 7, 7, 7],
        ]
    )
    token_ids_N = torch.tensor([3, 0, 5, 4, 1], dtype=torch.int32)
    target = SparseTarget(ids_NS, logps_NS)
    assert_forward_kl(logits_NV, token_ids_N, target, tail=tail, temperature=1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_full_vocabulary(dtype: torch.dtype) -> None:
    logits_NV = cpp_rows.random_logits(3, 151936, dtype)
    target = cpp_rows.target_of("teachers", 3, 151936, 16, True)
    assert target is not None
    assert_forward_kl(logits_NV, torch.tensor([0, 151935, 7]), target, tail=True, temperature=1.0)


def test_teachers_equal_the_target_that_they_make() -> None:
    logits_NV = cpp_rows.random_logits(20, 300, torch.float32)
    teachers = cpp_rows.random_teachers(20, 300, 8, n_teachers=3)
    token_ids_N = torch.arange(20)
    for merge, tail, kappa in itertools.product((True, False), (True, False), (0, 1, 5, 24, 30)):
        union = Candidates(*teachers, kappa, merge)
        mixture = cpp.teacher_mixture(*teachers, kappa, merge=merge)
        made = SparseTarget(mixture.ids_NS, mixture.logps_NS)
        options = KlOptions(tail=tail, temperature=0.9)
        for one, other in zip(
            cpp.forward_kl_rows(logits_NV, token_ids_N, union, options),
            cpp.forward_kl_rows(logits_NV, token_ids_N, made, options),
            strict=True,
        ):
            assert torch.equal(one, other)


def test_hostile_rows_are_as_in_the_reference() -> None:
    inf, nan = math.inf, math.nan
    logits_NV = torch.tensor(
        [[0.0, 1.0, 2.0, 3.0], [-inf] * 4, [nan, 0.0, 0.0, 0.0], [inf, 0.0, 0.0, 0.0], [-inf, 1.0, -inf, 2.0]]
    )
    target = SparseTarget(
        torch.tensor([[0, 1, 9]]).expand(5, 3), torch.tensor([0.5, 0.3, 0.0]).log().expand(5, 3)
    )
    for tail in (True, False):
        assert_forward_kl(logits_NV, torch.tensor([1, 1, 1, 1, 0]), target, tail=tail, temperature=1.0)


def test_threads_and_layout() -> None:
    logits_NV = cpp_rows.random_logits(24, 40000, torch.bfloat16)
    target = cpp_rows.target_of("teachers", 24, 39990, 16, True)
    assert isinstance(target, Candidates)
    view_NV = logits_NV[:, 5:39995]
    token_ids_N = torch.arange(24) * 1601
    options = KlOptions(tail=True, temperature=1.0)
    dlogp_N, dkl_N = slopes(24)
    gradient = {"dlogp_N": dlogp_N, "dkl_N": dkl_N.to(torch.bfloat16)}
    threads = torch.get_num_threads()
    results = []
    try:
        for count, rows_NV in ((1, view_NV), (2, view_NV), (2, view_NV.contiguous())):
            torch.set_num_threads(count)
            terms = cpp.forward_kl_rows(rows_NV, token_ids_N, target, options)
            results.append(
                (*terms, cpp.forward_kl_gradient(rows_NV, token_ids_N, target, options, **gradient))
            )
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_empty_shapes() -> None:
    none_NV, tokens_N = torch.empty(0, 10), torch.empty(0, dtype=torch.int64)
    target = SparseTarget(torch.empty(0, 4, dtype=torch.int64), torch.empty(0, 4))
    options = KlOptions(tail=True, temperature=1.0)
    logp_N, kl_N = cpp.forward_kl_rows(none_NV, tokens_N, target, options)
    assert logp_N.shape == kl_N.shape == (0,)
    assert cpp.forward_kl_gradient(none_NV, tokens_N, target, options, logp_N, None).shape == (0, 10)


def test_operator_schemas() -> None:
    logits_NV = cpp_rows.random_logits(3, 50, torch.float32)
    ids_NMS, logps_NMS, log_alpha = cpp_rows.random_teachers(3, 50, 4)
    teachers = (ids_NMS, logps_NMS, log_alpha.expand(3, 2))
    token_ids_N = torch.tensor([1, 2, 3])
    columns = [torch.ones(3)] * 7
    constants = (0.2, 0.2, 3.0, 1.0, 0.1, 1.0, 0.9, False)
    for operator, arguments in (
        (torch.ops.smopd.teacher_mixture_cpu, (*teachers, 4, True)),
        (torch.ops.smopd.forward_kl_rows_cpu, (logits_NV, token_ids_N, *teachers, 4, True, True, 1.0)),
        (
            torch.ops.smopd.forward_kl_gradient_cpu,
            (logits_NV, token_ids_N, *teachers, 4, True, True, 1.0, torch.ones(3), None),
        ),
        (
            torch.ops.smopd.loss_rows_cpu,
            (logits_NV, token_ids_N, *columns, *teachers, 4, True, True, *constants, torch.empty(3, 50)),
        ),
    ):
        torch.library.opcheck(operator.default, arguments, test_utils=("test_schema",))
