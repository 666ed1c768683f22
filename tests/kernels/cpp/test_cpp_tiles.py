"""smopd._C's two passes over tiles of logits: the rows' sums, and the gradient in place, against float64."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from smopd.kernels import cpp, dispatch
from smopd.kernels.head.tiles import Merged, Plan, TileLoss, finish
from smopd.kernels.reference import tiles as reference_tiles
from smopd.kernels.reference import topk as reference
from smopd.kernels.types import LossSettings, LossTokens, SparseTarget, TokenTerms
from smopd.ops import linear_smopd_loss
from tests.kernels import float64
from tests.kernels.cpp import cpp_rows
from tests.kernels.cpp.cpp_rows import DTYPES, TERMS
from tests.kernels.cpp.test_cpp_loss import hostile_logits
from tests.kernels.head import linear_cases

cpp_rows.need_extension()
pytestmark = pytest.mark.usefixtures("poisoned_memory")

INF = math.inf
N, V, S = 13, 4301, 9
Cuts = Sequence[int]
ONE: Cuts = (0, V)
CUTS: dict[str, Cuts] = {"one": ONE, "odd": (0, 1, 2, 2051, 2052, V), "even": (0, 2048, 4096, V)}
ROWS = (0, 5, 6, N)  # of the tiles
SETTINGS = [
    LossSettings(
        kappa=S,
        dual_clip=3.0,
        opd_coef=opd,
        entropy_coef=entropy,
        tail=tail,
        merge=merge,
        temperature=temperature,
        kl_temperature=kl_temperature,
    )
    for (temperature, kl_temperature), entropy, tail, merge in itertools.product(
        ((1.0, 1.0), (0.7, 0.7), (0.7, 1.0)), (0.0, 0.05), (True, False), (True, False)
    )
    for opd in ((0.7, 0.0) if entropy and merge else (0.7,))
]


def scanned(
    logits_NV: Tensor, tokens: LossTokens, settings: LossSettings, passes: type[TileLoss], cuts: Cuts
) -> tuple[Plan, Tensor]:
    plan = passes.plan_of(tokens, settings, logits_NV.dtype)
    sums_CN = plan.empty_sums()
    rows = [row for row in ROWS if row < len(logits_NV)] + [len(logits_NV)]
    for (first, last), (start, stop) in itertools.product(itertools.pairwise(cuts), itertools.pairwise(rows)):
        passes(plan).scan(sums_CN, logits_NV[start:stop, first:last], start, first)
    return plan, sums_CN


def loss(
    logits_NV: Tensor, tokens: LossTokens, settings: LossSettings, cuts: Cuts = ONE
) -> tuple[TokenTerms, Tensor]:
    """The terms and the gradient by C++."""
    plan, sums_CN = scanned(logits_NV, tokens, settings, cpp.TileLoss, cuts)
    merged = finish(plan, sums_CN)
    return merged.terms, gradient(plan, merged, logits_NV, cuts)


def gradient(plan: Plan, merged: Merged, logits_NV: Tensor, cuts: Cuts) -> Tensor:
    grad_NV = logits_NV.clone()
    rows = [row for row in ROWS if row < len(logits_NV)] + [len(logits_NV)]
    for (first, last), (start, stop) in itertools.product(itertools.pairwise(cuts), itertools.pairwise(rows)):
        cpp.TileLoss(plan).gradient_(merged, grad_NV[start:stop, first:last], start, first)
    return grad_NV


def assert_loss(logits_NV: Tensor, tokens: LossTokens, settings: LossSettings, cuts: Cuts) -> Tensor:
    terms, grad_NV = loss(logits_NV, tokens, settings, cuts)
    true_terms, true_NV = float64.true_loss(logits_NV, tokens, settings)
    cpp_rows.assert_terms(terms, true_terms)
    cpp_rows.assert_gradient(grad_NV, true_NV, cpp_rows.loss_magnitude(logits_NV, tokens, settings))
    return grad_NV


def tokens_of(logits_NV: Tensor, kind: str, settings: LossSettings) -> LossTokens:
    """A given target of a pooled mixture holds ids twice."""
    n_rows, n_vocab = logits_NV.shape
    target = cpp_rows.target_of(kind, n_rows, n_vocab, S, settings.merge)
    return cpp_rows.random_tokens(logits_NV, target)


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("kind", ["none", "given", "teachers"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_float64(dtype: torch.dtype, kind: str, cuts: str) -> None:
    logits_NV = cpp_rows.random_logits(N, V, dtype)
    for settings in SETTINGS:
        tokens = tokens_of(logits_NV, kind, settings)
        grad_NV = assert_loss(logits_NV, tokens, settings, CUTS[cuts])
        assert not grad_NV[6].any() and not grad_NV[6].signbit().any()  # a token that counts nowhere


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_are_the_references(dtype: torch.dtype, cuts: str) -> None:
    logits_NV = cpp_rows.random_logits(N, V, dtype)
    logits_NV[1, 5:2500] = -INF
    logits_NV[2] = -INF
    logits_NV[3, 4000] = math.nan
    logits_NV[4, 4000] = INF
    for settings in SETTINGS:
        tokens = tokens_of(logits_NV, "given", settings)
        plan, got_CN = scanned(logits_NV, tokens, settings, cpp.TileLoss, CUTS[cuts])
        _, true_CN = scanned(
            logits_NV.double(), float64.in_float64(tokens), settings, reference_tiles.TileLoss, CUTS[cuts]
        )
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
@pytest.mark.parametrize("merge", [True, False], ids=["merged", "pooled"])
@pytest.mark.parametrize("kind", ["given", "teachers"])
def test_a_target_made_ready_is_the_references(kind: str, merge: bool, tail: bool) -> None:
    """Slots may be in another order; what an id has, and what a row has, is the same."""
    target = cpp_rows.target_of(kind, N, V, S, merge)
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


@pytest.mark.parametrize("inactive", ["", "pg_weight_N", "kl_weight_N", "every weight"])
@pytest.mark.parametrize("tail", [True, False], ids=["tail", "no tail"])
@pytest.mark.parametrize("case", hostile_logits())
def test_hostile_rows(case: str, tail: bool, inactive: str) -> None:
    """The hostile row between two plain ones, in pieces, as the reference has whole rows in float64."""
    plain_V = hostile_logits()["plain"]
    logits_NV = torch.stack([plain_V, hostile_logits()[case], plain_V])
    one_N = torch.ones(3)
    tokens = LossTokens(
        token_ids_N=torch.full((3,), 7),
        adv_N=-one_N,
        pg_weight_N=0.5 * one_N,
        old_logp_N=-9.0 * one_N,
        kl_weight_N=0.25 * one_N,
        ent_weight_N=0.125 * one_N,
        target_ids_NS=torch.tensor([[0, 1, 2, 3, 1, 2999999]]).expand(3, 6),
        target_logps_NS=torch.tensor([0.4, 0.2, 0.1, 0.05, 0.05, 0.0]).log().expand(3, 6),
    )
    zeros = ("pg_weight_N", "kl_weight_N", "ent_weight_N") if inactive == "every weight" else (inactive,)
    tokens = replace(tokens, **{name: 0.0 * one_N for name in zeros if name})
    entropy = LossSettings(tail=tail, entropy_coef=0.1)
    for settings in (LossSettings(tail=tail), entropy, replace(entropy, kl_temperature=0.8)):
        for cuts in ((0, 3000), (0, 1, 2, 8, 2050, 2960, 3000)):
            grad_NV = assert_loss(logits_NV, tokens, settings, cuts)
            assert torch.equal(grad_NV[0], grad_NV[2]), "a row next to a hostile one"


@pytest.mark.parametrize("value", [math.nan, -INF, 1000.0], ids=str)
@pytest.mark.parametrize("settings", SETTINGS[::5], ids=lambda settings: f"T{settings.temperature}")
def test_a_hostile_support(settings: LossSettings, value: float) -> None:
    """Teachers' log-probabilities and the student's logits of them, far from the stream or not there."""
    logits_NV = cpp_rows.random_logits(N, V, torch.float32)
    tokens = tokens_of(logits_NV, "given", settings)
    assert tokens.target_ids_NS is not None and tokens.target_logps_NS is not None
    changed_NV = logits_NV.scatter(1, tokens.target_ids_NS[:, :2].long(), value)
    assert_loss(changed_NV, tokens, settings, CUTS["odd"])
    if value < 0 or math.isnan(value):
        logps_NS = tokens.target_logps_NS.clone()
        logps_NS[1, 0] = logps_NS[2] = value
        assert_loss(logits_NV, replace(tokens, target_logps_NS=logps_NS), settings, CUTS["odd"])


def test_a_row_whose_tile_is_idle_is_zero_whatever_it_holds() -> None:
    logits_NV = cpp_rows.random_logits(N, V, torch.bfloat16)
    logits_NV[1] = math.nan
    tokens = tokens_of(logits_NV, "teachers", LossSettings())
    zero_N = torch.zeros(N)
    tokens = replace(tokens, pg_weight_N=zero_N, kl_weight_N=zero_N, reverse_weight_N=zero_N)
    terms, grad_NV = loss(logits_NV, tokens, LossSettings(), CUTS["odd"])
    assert not grad_NV.any() and not grad_NV.signbit().any() and bool(terms.entropy_N[1].isnan())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_may_be_strided_and_nothing_else_is_written(dtype: torch.dtype) -> None:
    logits_NV = cpp_rows.random_logits(N, V, dtype)
    tokens, settings = tokens_of(logits_NV, "given", LossSettings()), LossSettings(entropy_coef=0.1)
    plan, sums_CN = scanned(logits_NV, tokens, settings, cpp.TileLoss, ONE)
    merged, first, last = finish(plan, sums_CN), 17, 2500
    want_NV = gradient(plan, merged, logits_NV, (0, first, last, V))
    wide_NV = torch.full((2 * N, last + 40), math.nan, dtype=dtype)
    view_NP = wide_NV[::2, 5 : 5 + last - first]
    view_NP.copy_(logits_NV[:, first:last])
    cpp.TileLoss(plan).gradient_(merged, view_NP, 0, first)
    assert torch.equal(view_NP, want_NV[:, first:last])
    view_NP.fill_(math.nan)
    assert bool(wide_NV.isnan().all()), "written outside the rows"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_depend_on_neither_threads_nor_other_rows(dtype: torch.dtype) -> None:
    logits_NV = cpp_rows.random_logits(37, 9000, dtype)
    cuts, settings = (0, 4001, 9000), LossSettings(kappa=S, entropy_coef=0.01, kl_temperature=0.9)
    tokens = tokens_of(logits_NV, "teachers", settings)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        plan, sums_CN = scanned(logits_NV, tokens, settings, cpp.TileLoss, cuts)
        merged = finish(plan, sums_CN)
        grad_NV = gradient(plan, merged, logits_NV, cuts)
        for count in (2, 3):
            torch.set_num_threads(count)
            assert torch.equal(scanned(logits_NV, tokens, settings, cpp.TileLoss, cuts)[1], sums_CN)
            assert torch.equal(gradient(plan, merged, logits_NV, cuts), grad_NV)
        torch.set_num_threads(1)
        for n in (0, 20, 36):
            one = (logits_NV[n : n + 1], tokens.rows(n, n + 1), settings)
            assert torch.equal(scanned(*one, cpp.TileLoss, cuts)[1], sums_CN[:, n : n + 1])
            assert torch.equal(loss(*one, cuts)[1], grad_NV[n : n + 1])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("chunk_bytes", [None, 5 * 1024 * 4], ids=["default", "few rows"])
@pytest.mark.parametrize("target", linear_cases.TARGETS)
@pytest.mark.parametrize("name", linear_cases.SETTINGS)
def test_a_head_in_tiles(name: str, target: str, chunk_bytes: int | None) -> None:
    """Forward and every gradient, by the rule of the dense loss."""
    settings = linear_cases.SETTINGS[name]
    for dtype in DTYPES:
        leaves = linear_cases.head(dtype)
        assert leaves[2] is not None
        tokens = linear_cases.loss_tokens(linear_cases.dense(*leaves).detach(), settings, target)
        got, _ = linear_smopd_loss(
            *leaves[:2], tokens, settings, bias_V=leaves[2], recompute=True, chunk_bytes=chunk_bytes
        )
        grads = torch.autograd.grad(0.5 * got, leaves)
        linear_cases.assert_by_the_rule(got.detach(), grads, leaves, tokens, settings, factor=0.5)


def test_a_tile_of_no_rows_or_no_support() -> None:
    logits_NV = cpp_rows.random_logits(0, 10, torch.float32)
    tokens = cpp_rows.random_tokens(logits_NV, cpp_rows.target_of("given", 0, 10, 4, True))
    assert loss(logits_NV, tokens, LossSettings(), (0, 10))[1].shape == (0, 10)
    logits_NV = cpp_rows.random_logits(3, 10, torch.float32)
    nothing = SparseTarget(torch.zeros(3, 0, dtype=torch.int32), torch.zeros(3, 0))
    tokens = cpp_rows.random_tokens(logits_NV, None)
    tokens = replace(tokens, target_ids_NS=nothing.ids_NS, target_logps_NS=nothing.logps_NS)
    for settings in (LossSettings(), LossSettings(tail=False, kl_temperature=0.5, entropy_coef=0.1)):
        assert_loss(logits_NV, tokens, settings, (0, 1, 10))


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

    served = {name: dispatch.SERVED.format(device="cpu", backend=name) for name in ("cpp", "reference")}
    start = f"some_op with {form} on cpu is served by the reference backend: "
    for dtype in DTYPES:
        tensor = torch.zeros(1, dtype=dtype)
        for backend in ("", "cpp"):
            assert said(backend, tensor) == (cpp.TileLoss, [served["cpp"]])
        assert said("reference", tensor) == (reference_tiles.TileLoss, [served["reference"]])
    chosen, (line,) = said("", torch.zeros(1, dtype=torch.float64))
    assert chosen is reference_tiles.TileLoss and line.startswith(start + "the dtype is torch.float64")
    with pytest.raises(RuntimeError, match="some_op: SMOPD_BACKEND=cpp cannot serve this call: the dtype"):
        said("cpp", torch.zeros(1, dtype=torch.float64))


def arguments_of(n_sums: int = 3 + 1 + 2) -> tuple[dict, dict]:
    """Of the two operators, for (2, 8) logits and a support of two."""
    shared = {
        "tile": torch.zeros(2, 8),
        "column": 0,
        "token_ids": torch.tensor([1, 9]),
        "ids": torch.tensor([[0, 1], [7, 8]]),
        "live": torch.ones(2, dtype=torch.bool),
        "temperature": 1.0,
        "kl_temperature": 1.0,
        "tail": True,
    }
    wide = {"dtype": torch.float64}
    scan = shared | {"sums": torch.zeros(n_sums, 2, **wide)}
    return scan, shared | {
        "q": torch.zeros(2, 2, **wide),
        "entropy": False,
        "columns": torch.zeros(4 + 7, 2, **wide),
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tile": torch.zeros(2, 8, dtype=torch.float64)}, "tile is not float32, bfloat16 or float16"),
        ({"column": -1}, "column is -1, expected at least 0"),
        ({"token_ids": torch.zeros(3, dtype=torch.int64)}, r"token_ids has to be of shape \(N,\) = \(2,\)"),
        ({"ids": torch.zeros(1, 2, dtype=torch.int64)}, "ids has to have two dimensions and N = 2 rows"),
        ({"live": torch.ones(3, dtype=torch.bool)}, "live has to be a CPU tensor of bool"),
        ({"live": None}, "ids and live have to come together"),
        ({"kl_temperature": 0.0}, "kl_temperature is 0, expected a positive number"),
        ({"kl_temperature": 0.5}, r"there are (6|11) columns, expected (9|15)"),
    ],
)
def test_wrong_arguments_are_named(change: dict, message: str) -> None:
    scan, grad = arguments_of()
    with pytest.raises(RuntimeError, match="tile_scan_cpu: .*" + message):
        torch.ops.smopd.tile_scan_cpu(**(scan | change))
    with pytest.raises(RuntimeError, match="tile_gradient_cpu: .*" + message):
        torch.ops.smopd.tile_gradient_cpu(**(grad | change))


def test_wrong_numbers_of_a_row_are_named() -> None:
    scan, grad = arguments_of()
    with pytest.raises(RuntimeError, match="tile_scan_cpu: the columns have to be a CPU tensor of float64"):
        torch.ops.smopd.tile_scan_cpu(**(scan | {"sums": torch.zeros(6, 2)}))
    with pytest.raises(RuntimeError, match="tile_gradient_cpu: q has to be a CPU tensor of float64"):
        torch.ops.smopd.tile_gradient_cpu(**(grad | {"q": torch.zeros(2, 2)}))


def test_operator_schemas() -> None:
    scan, grad = arguments_of()
    for operator, arguments in (
        (torch.ops.smopd.tile_scan_cpu, scan),
        (torch.ops.smopd.tile_gradient_cpu, grad),
    ):
        torch.library.opcheck(operator.default, (), arguments, test_utils=("test_schema",))


def test_terms_are_those_of_the_dense_kernel_in_its_dtype() -> None:
    logits_NV = cpp_rows.random_logits(N, V, torch.bfloat16)
    settings = LossSettings(kappa=S)
    tokens = tokens_of(logits_NV, "teachers", settings)
    dense, terms = cpp.loss_rows(logits_NV, tokens, settings, None), loss(logits_NV, tokens, settings)[0]
    for name in TERMS:
        torch.testing.assert_close(getattr(terms, name), getattr(dense, name), rtol=2e-6, atol=2e-6)
