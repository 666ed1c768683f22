"""forward_kl_rows and forward_kl_gradient of every backend against float64, and on infinities and NaN."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from smopd.kernels.types import Candidates, KlOptions, SparseTarget
from tests.kernels import backends, cases, float64
from tests.kernels.pairwise import label, pairwise

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of the interpreter's numpy
    pytest.mark.usefixtures("poisoned_memory"),
]
INF, NAN = math.inf, math.nan
each_backend = backends.each("forward_kl_rows")
tails = pytest.mark.parametrize("tail", [True, False], ids=["tail", "paper"])
FACTORS = {
    "shape": (cases.SHAPES[1], cases.SHAPES[0], cases.SHAPES[2]),
    "dtype": cases.HALF,
    "target": cases.TARGETS[1:],
    "tail": (False, True),
    "temperature": (1.0, 0.7),
    "upstream": ("both", "logp", "kl"),
    "layout": cases.LAYOUTS,
}


@dataclass
class Case:
    logits_NV: Tensor
    token_ids_N: Tensor
    target: SparseTarget | Candidates
    options: KlOptions
    dlogp_N: Tensor | None
    dkl_N: Tensor | None
    of: Callable[..., float64.KlTruth] = float64.true_kl

    @functools.cached_property
    def truth(self) -> float64.KlTruth:
        slopes = (self.dlogp_N, self.dkl_N)
        return self.of(self.logits_NV, self.token_ids_N, self.target, self.options, *slopes)

    def at(self, rows: Tensor) -> Case:
        def cut(value: Tensor | None) -> Tensor | None:
            return None if value is None else value[rows]

        if isinstance(self.target, SparseTarget):
            target: SparseTarget | Candidates = SparseTarget(
                self.target.ids_NS[rows], self.target.logps_NS[rows]
            )
        else:
            columns = {
                name: getattr(self.target, name)[rows] for name in ("ids_NMS", "logps_NMS", "log_alpha")
            }
            target = replace(self.target, **columns)
        slopes = (cut(self.dlogp_N), cut(self.dkl_N))
        part = Case(self.logits_NV[rows], self.token_ids_N[rows], target, self.options, *slopes, self.of)
        if "truth" in self.__dict__:
            part.__dict__["truth"] = self.truth.at(rows)
        return part


@functools.lru_cache(maxsize=4)
def make(
    shape: tuple[int, int, int, int] = cases.SHAPES[1],
    dtype: str = "fp32",
    target: str = "merged",
    tail: bool = True,
    temperature: float = 1.0,
    upstream: str = "both",
) -> Case:
    n_rows, n_vocab, n_teachers, kappa = shape
    logits_NV = cases.random_logits(n_rows, n_vocab, dtype)
    given = cases.target_of(target, n_rows, n_vocab, kappa, n_teachers)
    assert given is not None
    token_ids_N = cases.random_tokens(logits_NV, given).token_ids_N
    generator = torch.Generator().manual_seed(5)
    dlogp_N, dkl_N = torch.randn(2, n_rows, generator=generator)
    dkl_N[1::4] = 0.0
    slopes = (None if upstream == "kl" else dlogp_N, None if upstream == "logp" else dkl_N)
    if dtype == "fp64":
        given, slopes = float64.in_float64(given), tuple(s if s is None else s.double() for s in slopes)
    return Case(logits_NV, token_ids_N, given, KlOptions(tail=tail, temperature=temperature), *slopes)


def run(backend: str, case: Case, layout: str = "dense") -> tuple[Tensor, Tensor, Tensor]:
    """logp, KL, gradient."""
    backends.need(backend)
    rows_NV, _ = cases.laid_out(case.logits_NV.to(backends.device(backend)), layout)
    arguments = (case.token_ids_N, case.target, case.options)
    logp_N, kl_N, *kept = backends.call(backend, "forward_kl_rows", rows_NV, *arguments)
    slopes = (case.dlogp_N, case.dkl_N)
    return logp_N, kl_N, backends.call(backend, "forward_kl_gradient", rows_NV, *arguments, *slopes, *kept)


def check(backend: str, case: Case, layout: str = "dense", most: int = backends.INTERPRETED_ROWS) -> tuple:
    case.truth  # noqa: B018  (computed once for all rows and backends)
    case = case.at(backends.rows_for(backend, len(case.logits_NV), most))
    logp_N, kl_N, grad_NV = run(backend, case, layout)
    float64.check_term(logp_N, case.truth.logp_N, "logp")
    float64.check_term(kl_N, case.truth.kl_N, "kl")
    assert grad_NV.dtype == case.logits_NV.dtype
    float64.check_gradient(grad_NV, case.truth, backend)
    return logp_N, kl_N, grad_NV


@each_backend
@pytest.mark.parametrize("row", pairwise(FACTORS), ids=label)
def test_equals_float64(row: dict, backend: str) -> None:
    check(backend, make(**{name: value for name, value in row.items() if name != "layout"}), row["layout"])


@backends.each("forward_kl_rows", but=("triton",))
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("target", cases.TARGETS[1:])
def test_every_combination_that_chooses_a_path(target: str, dtype: str, backend: str) -> None:
    if dtype == "fp64" and backend == "cpp":
        pytest.skip("float64 is the reference's: dispatch gives it no other")
    for tail, temperature, upstream in itertools.product((True, False), (1.0, 0.7), FACTORS["upstream"]):
        check(backend, make((6, 211, 3, 9), dtype, target, tail, temperature, upstream))


@each_backend
def test_teachers_are_the_target_that_they_make(backend: str) -> None:
    """kappa up to and above the whole union."""
    for merge, tail, kappa in itertools.product((True, False), (True, False), (0, 1, 5, 24, 30)):
        if backends.interpreted(backend) and (merge == tail or kappa in (1, 5)):
            continue  # half of them
        case = make((3, 300, 3, 8), target="merged", tail=tail, temperature=0.9)
        case = case.at(backends.rows_for(backend, 3, 1))
        assert isinstance(case.target, Candidates)
        teachers = (case.target.ids_NMS, case.target.logps_NMS, case.target.log_alpha)
        mixture = backends.call(backend, "teacher_mixture", *teachers, kappa, merge=merge)
        union = replace(case, target=Candidates(*teachers, kappa, merge))
        got = run(backend, union)
        want = run(backend, replace(case, target=SparseTarget(mixture.ids_NS, mixture.logps_NS)))
        assert backend != "cpp" or backends.same(got[:2], want[:2])
        for mine, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=2e-6)


@each_backend
@tails
@pytest.mark.parametrize("dtype", cases.HALF)
def test_no_nan_of_a_target_where_the_kl_has_no_gradient(dtype: str, tail: bool, backend: str) -> None:
    """The gradient is that of an empty slot, bit for bit in C++."""
    backends.leave_to_a_gpu(backend, dtype != "fp32")  # it is the target's path, not the logits'
    case = make((3, 2500, 1, 6), dtype, "given", tail, 0.7)
    assert isinstance(case.target, SparseTarget)

    def gradient(value: float, dkl_N: Tensor | None) -> Tensor:
        logps_NS = case.target.logps_NS.clone()
        logps_NS[1, 0] = value
        changed = replace(case, target=SparseTarget(case.target.ids_NS, logps_NS), dkl_N=dkl_N)
        return run(backend, changed)[2]

    dkl_N = torch.ones(3)
    assert gradient(NAN, dkl_N).isnan().all(1).tolist() == [False, True, False]
    dkl_N[1] = 0.0
    for upstream_N in (dkl_N, None):
        grad_NV, want_NV = gradient(NAN, upstream_N), gradient(-INF, upstream_N)
        assert bool(grad_NV[1].any()) and (backend != "cpp" or torch.equal(grad_NV, want_NV))
        torch.testing.assert_close(grad_NV.float(), want_NV.float(), rtol=1e-4, atol=1e-8)


@backends.each("forward_kl_rows", but=("reference", "triton"))
def test_neither_threads_nor_strides_show(backend: str, each_number_of_threads) -> None:
    case = make((24, 40_000, 2, 16), "bf16")
    half = replace(case, dkl_N=case.dkl_N.bfloat16())
    results = each_number_of_threads(lambda: run(backend, half, "odd"))
    results += [run(backend, half, layout) for layout in ("inside", "dense")]
    assert all(backends.same(result, results[0]) for result in results)


@each_backend
@pytest.mark.parametrize("target", ["given", "merged"])
def test_no_rows(target: str, backend: str) -> None:
    logp_N, kl_N, grad_NV = run(
        backend, make((3, 40, 2, 4), target=target).at(torch.zeros(0, dtype=torch.int64))
    )
    assert logp_N.shape == kl_N.shape == (0,) and grad_NV.shape == (0, 40)
