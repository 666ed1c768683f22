"""smopd._C's passes over tiles of logits: their sums, the target made ready for them, and whom they serve.

The loss that they make is held to float64 in tests/kernels/conformance, as the backend "cpp tiles".
"""

from __future__ import annotations

import itertools
import logging
import math

import pytest
import torch
from torch import Tensor

from smopd.kernels import cpp, dispatch
from smopd.kernels.head.tiles import Plan, TileLoss, finish
from smopd.kernels.reference import tiles as reference_tiles
from smopd.kernels.reference import topk as reference
from smopd.kernels.types import LossSettings, LossTokens, SparseTarget
from smopd.ops import linear_smopd_loss
from tests.kernels import backends, cases, float64
from tests.kernels.cases import DTYPES, HALF, loss_case
from tests.kernels.head import linear_cases

pytestmark = [
    pytest.mark.skipif(dispatch.cpp_unavailable() is not None, reason="smopd._C is not built"),
    pytest.mark.usefixtures("poisoned_memory"),
]
INF = math.inf
N, V, S = 13, 4301, 9
each_dtype = pytest.mark.parametrize("dtype", HALF)


def scanned(
    logits_NV: Tensor, tokens: LossTokens, settings: LossSettings, passes: type[TileLoss]
) -> tuple[Plan, Tensor]:
    plan = passes.plan_of(tokens, settings, logits_NV.dtype)
    sums_CN = plan.empty_sums()
    for (first, last), (start, stop) in backends.tiles_of(*logits_NV.shape):
        passes(plan).scan(sums_CN, logits_NV[start:stop, first:last], start, first)
    return plan, sums_CN


@each_dtype
def test_sums_are_the_references(dtype: str) -> None:
    for tail, entropy, temperatures in itertools.product(
        (True, False), (True, False), ((1.0, 1.0), (0.7, 0.7), (0.7, 1.0))
    ):
        case = loss_case((N, V, 2, S), dtype, "repeats", tail, entropy, temperatures)
        logits_NV = case.logits_NV.clone()
        logits_NV[1, 5:2500] = -INF
        logits_NV[2] = -INF
        logits_NV[3, 4000] = math.nan
        logits_NV[4, 4000] = INF
        plan, got_CN = scanned(logits_NV, case.tokens, case.settings, cpp.TileLoss)
        wide = (logits_NV.double(), float64.in_float64(case.tokens), case.settings)
        _, true_CN = scanned(*wide, reference_tiles.TileLoss)
        assert got_CN.dtype == true_CN.dtype == torch.float64
        exact = {"rtol": 1e-14, "atol": 0.0, "equal_nan": True}
        for level in range(len(plan.levels)):
            got_3N, true_3N = plan.level_of(got_CN, level), plan.level_of(true_CN, level)
            torch.testing.assert_close(got_3N[0], true_3N[0], **exact)
            asked = slice(1, 3 if plan.levels[level].entropy else 2)  # no slope elsewhere
            torch.testing.assert_close(got_3N[asked], true_3N[asked], rtol=1e-6, atol=0.0, equal_nan=True)
        assert plan.target is not None
        for got, ids in zip(plan.picked_of(got_CN), (plan.token_ids_N1, plan.target.ids_NS), strict=True):
            torch.testing.assert_close(got, logits_NV.double().gather(1, ids), **exact)


@pytest.mark.parametrize("tail", [True, False], ids=["tail", "no tail"])
@pytest.mark.parametrize("kind", ["given", "repeats", "pooled", "merged"])
def test_a_target_made_ready_is_the_references(kind: str, tail: bool) -> None:
    """Slots may be in another order; what an id has, and what a row has, is the same."""
    target = cases.target_of(kind, N, V, S)
    if isinstance(target, SparseTarget):
        logps_NS = target.logps_NS.clone()
        logps_NS[1, 0], logps_NS[2] = math.nan, -INF
        target = SparseTarget(target.ids_NS, logps_NS)
    assert target is not None
    got, true = (of(target, torch.float64, tail=tail) for of in (cpp.target_of, reference.target_of))
    assert torch.equal(got.live_N, true.live_N)
    torch.testing.assert_close(got.mass_N, true.mass_N, rtol=1e-6, atol=0.0, equal_nan=True)
    assert got.ids_NS.dtype == torch.int64 and got.q_NS.dtype == got.mass_N.dtype == torch.float64
    columns = []
    for one in (got, true):
        zero_NV = torch.zeros(N, V, dtype=torch.float64)
        terms_NS = torch.where(one.q_NS > 0, one.q_NS * one.logps_NS, 0.0)
        values = (one.q_NS, terms_NS, one.first_NS.double())
        columns.append([zero_NV.scatter_add(1, one.ids_NS, value_NS) for value_NS in values])
    for mine_NV, true_NV in zip(*columns, strict=True):
        torch.testing.assert_close(mine_NV, true_NV, rtol=1e-6, atol=1e-12)


@each_dtype
def test_nothing_but_a_tiles_own_memory_is_written(dtype: str) -> None:
    case = loss_case((N, V, 2, S), dtype, "repeats", entropy=True)
    plan, sums_CN = scanned(case.logits_NV, case.tokens, case.settings, cpp.TileLoss)
    merged, first, last = finish(plan, sums_CN), 17, 2500
    _, want_NV = cases.run_loss("cpp tiles", case)
    wide_NV = torch.full((2 * N, last + 40), math.nan, dtype=DTYPES[dtype])
    view_NP = wide_NV[::2, 5 : 5 + last - first]
    view_NP.copy_(case.logits_NV[:, first:last])
    cpp.TileLoss(plan).gradient_(merged, view_NP, 0, first)
    assert torch.equal(view_NP, want_NV[:, first:last])
    view_NP.fill_(math.nan)
    assert bool(wide_NV.isnan().all()), "written outside the rows"


@pytest.mark.parametrize("chunk_bytes", [None, 5 * 1024 * 4], ids=["default", "few rows"])
@pytest.mark.parametrize("target", linear_cases.TARGETS)
@pytest.mark.parametrize("name", linear_cases.SETTINGS)
def test_a_head_in_tiles(name: str, target: str, chunk_bytes: int | None) -> None:
    """Forward and every gradient, by the rule of the dense loss."""
    settings = linear_cases.SETTINGS[name]
    for dtype in (DTYPES[name] for name in HALF):
        leaves = linear_cases.head(dtype)
        assert leaves[2] is not None
        tokens = linear_cases.loss_tokens(linear_cases.dense(*leaves).detach(), settings, target)
        got, _ = linear_smopd_loss(
            *leaves[:2], tokens, settings, bias_V=leaves[2], recompute=True, chunk_bytes=chunk_bytes
        )
        grads = torch.autograd.grad(0.5 * got, leaves)
        linear_cases.assert_by_the_rule(got.detach(), grads, leaves, tokens, settings, factor=0.5)


@pytest.mark.parametrize("form", ["recompute", "tp_group"])
def test_which_backend_has_the_passes(
    form: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(backend: str, tensor: Tensor) -> tuple[type[TileLoss], list[str]]:
        monkeypatch.setenv("SMOPD_BACKEND", backend)
        dispatch._log_once.cache_clear()
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="smopd"):
            chosen = dispatch.tile_loss("some_op", form, tensor)
        return chosen, [record.getMessage() for record in caplog.records]

    served = {name: dispatch.SERVED % ("cpu", name) for name in ("cpp", "reference")}
    start = f"some_op with {form} on cpu is served by the reference backend: "
    for dtype in (DTYPES[name] for name in HALF):
        tensor = torch.zeros(1, dtype=dtype)
        for backend in ("", "cpp"):
            assert said(backend, tensor) == (cpp.TileLoss, [served["cpp"]])
        assert said("reference", tensor) == (reference_tiles.TileLoss, [served["reference"]])
    chosen, (line,) = said("", torch.zeros(1, dtype=torch.float64))
    assert chosen is reference_tiles.TileLoss and line.startswith(start + "the dtype is torch.float64")
    with pytest.raises(RuntimeError, match="some_op: SMOPD_BACKEND=cpp cannot serve this call: the dtype"):
        said("cpp", torch.zeros(1, dtype=torch.float64))
