"""forward_kl_rows and forward_kl_gradient of every backend against float64; any values: test_hostile.py."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from tests.kernels import backends, cases
from tests.kernels.cases import LossCase, check_kl, kl_case, run_kl
from tests.kernels.pairwise import label, pairwise

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's numpy
each_backend = backends.each("forward_kl_rows")
FACTORS = {
    "shape": (cases.SHAPES[1], cases.SHAPES[0], cases.SHAPES[2]),
    "dtype": tuple(cases.DTYPES),
    "target": cases.TARGETS[1:],
    "tail": (False, True),
    "temperature": (1.0, 0.7),
    "upstream": ("both", "logp", "kl"),
    "layout": cases.LAYOUTS,
}


@each_backend
@pytest.mark.parametrize("row", pairwise(FACTORS), ids=label)
def test_equals_float64(row: dict, backend: str) -> None:
    options = {name: row[name] for name in row if name != "layout"}
    if backend != "reference":  # float64 is the reference's: dispatch gives it no other
        options["dtype"] = row["dtype"].replace("fp64", "fp32")
    check_kl(backend, kl_case(**options), row["layout"])


@each_backend
def test_teachers_are_the_target_that_they_make(backend: str) -> None:
    """kappa up to and above the whole union."""
    for merge, tail, kappa in itertools.product((True, False), (True, False), (0, 1, 5, 24, 30)):
        if backends.interpreted(backend) and (merge == tail or kappa in (1, 5)):
            continue  # half of them
        case = kl_case((3, 300, 3, 8), tail=tail, temperature=0.9)
        settings = replace(case.settings, kappa=kappa, merge=merge)
        union = LossCase(case.logits_NV, case.tokens, settings).at(backends.rows_for(backend, 3, 1))
        teachers = (union.tokens.teacher_ids_NMS, union.tokens.teacher_logps_NMS, union.tokens.log_alpha)
        mixture = backends.call(backend, "teacher_mixture", *teachers, kappa, merge=merge)
        target = {"target_ids_NS": mixture.ids_NS, "target_logps_NS": mixture.logps_NS}
        got, want = run_kl(backend, union), run_kl(backend, union.but(**target))
        assert backend != "cpp" or backends.same(got[:2], want[:2])
        for mine, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=2e-6)


@backends.each("forward_kl_rows", but=("reference", "triton"))
def test_neither_threads_nor_strides_show(backend: str, each_number_of_threads) -> None:
    case = kl_case((24, 40_000, 2, 16), "bf16")
    half = case.but(kl_weight_N=case.tokens.kl_weight_N.bfloat16())
    results = each_number_of_threads(lambda: run_kl(backend, half, "odd"))
    results += [run_kl(backend, half, layout) for layout in ("inside", "dense")]
    assert all(backends.same(result, results[0]) for result in results)


@each_backend
@pytest.mark.parametrize("target", ["given", "merged"])
def test_no_rows(target: str, backend: str) -> None:
    none = kl_case((3, 40, 2, 4), target=target).at(torch.zeros(0, dtype=torch.int64))
    assert [value.shape for value in run_kl(backend, none)] == [(0,), (0,), (0, 40)]
