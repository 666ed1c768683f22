"""The C++ backend's loss_rows against the reference in float64, in every combination of its settings."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from smopd.kernels import cpp
from smopd.kernels.reference import loss as reference_loss
from smopd.kernels.types import LossSettings, LossTokens, SparseTarget, TokenTerms
from tests.kernels import cases, float64
from tests.kernels.cpp import cpp_rows
from tests.kernels.cpp.cpp_rows import DTYPES, TERMS

cpp_rows.need_extension()
pytestmark = pytest.mark.usefixtures("poisoned_memory")

INF = math.inf
SETTINGS = [
    LossSettings(
        dual_clip=3.0, opd_coef=0.7, temperature=temperature, entropy_coef=entropy, tail=tail, merge=merge
    )
    for temperature, entropy, tail, merge in itertools.product(
        (1.0, 0.7), (0.0, 0.05), (True, False), (True, False)
    )
]


def loss(logits_NV: Tensor, tokens: LossTokens, settings: LossSettings) -> tuple[TokenTerms, Tensor]:
    """With a gradient buffer full of NaN; the same without a gradient and in place, bit for bit."""
    grad_NV = torch.full_like(logits_NV, math.nan)
    terms = cpp.loss_rows(logits_NV, tokens, settings, grad_NV)
    bare = cpp.loss_rows(logits_NV, tokens, settings, None)
    own_NV = logits_NV.clone()
    inplace = cpp.loss_rows(own_NV, tokens, settings, own_NV)
    for name in TERMS:
        for other in (bare, inplace):
            torch.testing.assert_close(
                getattr(other, name), getattr(terms, name), rtol=0, atol=0, equal_nan=True
            )
    torch.testing.assert_close(own_NV, grad_NV, rtol=0, atol=0, equal_nan=True)
    return terms, grad_NV


def assert_loss(logits_NV: Tensor, tokens: LossTokens, settings: LossSettings) -> None:
    terms, grad_NV = loss(logits_NV, tokens, settings)
    true_terms, true_NV = float64.true_loss(logits_NV, tokens, settings)
    cpp_rows.assert_terms(terms, true_terms)
    cpp_rows.assert_gradient(grad_NV, true_NV, cpp_rows.loss_magnitude(logits_NV, tokens, settings))


@pytest.mark.parametrize("kind", ["none", "given", "teachers"])
@pytest.mark.parametrize("case", cases.SMALL, ids=str)
def test_equals_float64(case: cases.Case, kind: str) -> None:
    logits_NV = cpp_rows.random_logits(case.N, case.V, case.torch_dtype)
    for settings in SETTINGS:
        settings = replace(settings, kappa=case.kappa)
        target = cpp_rows.target_of(kind, case.N, case.V, case.kappa, settings.merge, case.M)
        tokens = cpp_rows.random_tokens(logits_NV, target)
        assert_loss(logits_NV, tokens, settings)


@pytest.mark.parametrize("policy", [True, False], ids=["old policy", "on policy"])
@pytest.mark.parametrize("surrogate", ["paper", "ppo"])
@pytest.mark.parametrize("dual_clip", [None, 1.2])
def test_clips(dual_clip: float | None, surrogate: str, policy: bool) -> None:
    logits_NV = cpp_rows.random_logits(400, 31, torch.float32)
    tokens = cpp_rows.random_tokens(logits_NV, None, policy=policy)
    settings = LossSettings(clip_low=0.1, clip_high=0.3, dual_clip=dual_clip, reverse_kl_surrogate=surrogate)
    assert_loss(logits_NV, tokens, settings)
    seen = set(cpp.loss_rows(logits_NV, tokens, settings, None).clipped_N.tolist())
    assert policy == (len(seen) > 4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reverse_weight_defaults_to_the_kl_weight(dtype: torch.dtype) -> None:
    logits_NV = cpp_rows.random_logits(9, 40, dtype)
    tokens = replace(cpp_rows.random_tokens(logits_NV, None), reverse_weight_N=None)
    explicit = replace(tokens, reverse_weight_N=tokens.kl_weight_N)
    settings = LossSettings()
    assert torch.equal(loss(logits_NV, tokens, settings)[1], loss(logits_NV, explicit, settings)[1])


@pytest.mark.parametrize("tail", [True, False], ids=["tail", "no tail"])
def test_a_bf16_gradient_is_never_worse_than_eager(tail: bool) -> None:
    """In no row, by its norm; eager is the objective's own lines, in bf16."""
    logits_NV = cpp_rows.random_logits(9, 265, torch.bfloat16)
    target = cpp_rows.target_of("teachers", 9, 265, 8, True)
    tokens = cpp_rows.random_tokens(logits_NV, target, policy=False)
    settings = LossSettings(kappa=8, tail=tail, entropy_coef=0.05)
    _, true_NV = float64.true_loss(logits_NV, tokens, settings)
    leaf_NV = logits_NV.clone().requires_grad_()
    (eager_NV,) = torch.autograd.grad(float64.loss(leaf_NV, tokens, settings)[0], leaf_NV)
    ours_N, eager_N = (
        (grad - true_NV).norm(dim=1) for grad in (loss(logits_NV, tokens, settings)[1], eager_NV)
    )
    assert bool((ours_N <= eager_N).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_full_vocabulary(dtype: torch.dtype) -> None:
    logits_NV = cpp_rows.random_logits(3, 151936, dtype)
    target = cpp_rows.target_of("teachers", 3, 151936, 16, True)
    tokens = cpp_rows.random_tokens(logits_NV, target)
    for settings in (
        LossSettings(),
        LossSettings(entropy_coef=0.01, tail=False),
        LossSettings(kl_temperature=0.7),
    ):
        assert_loss(logits_NV, tokens, settings)


@pytest.mark.parametrize(
    "settings",
    [LossSettings(entropy_coef=0.01), LossSettings(merge=False, tail=False, kl_temperature=0.7)],
    ids=["merged-tail-entropy", "pooled-two-temperatures"],
)
@pytest.mark.parametrize("case", cases.FULL, ids=str)
def test_many_rows_of_the_full_vocabulary_equal_float64(case: cases.Case, settings: LossSettings) -> None:
    """All rows at once, in place; what is compared are rows from the first to the last."""
    settings = replace(settings, kappa=case.kappa)
    logits_NV = cpp_rows.random_logits(case.N, case.V, case.torch_dtype)
    target = cpp_rows.target_of("teachers", case.N, case.V, case.kappa, settings.merge, case.M)
    tokens = cpp_rows.random_tokens(logits_NV, target)
    rows = float64.some_rows(case.N)
    few_NV, few = logits_NV[rows], float64.picked(tokens, rows)
    terms = cpp.loss_rows(logits_NV, tokens, settings, logits_NV)
    true_terms, true_NV = float64.true_loss(few_NV, few, settings)
    cpp_rows.assert_terms(TokenTerms(**{name: getattr(terms, name)[rows] for name in TERMS}), true_terms)
    cpp_rows.assert_gradient(logits_NV[rows], true_NV, cpp_rows.loss_magnitude(few_NV, few, settings))
    assert bool(logits_NV.isfinite().all())


def test_the_same_rows_many_times_have_the_same_bits() -> None:
    logits_NV = cpp_rows.random_logits(8, 151936, torch.bfloat16).repeat(64, 1)
    target = cpp_rows.target_of("teachers", 8, 151936, 16, True)
    few = cpp_rows.random_tokens(logits_NV[:8], target)
    values = {name: getattr(few, name) for name in LossTokens.__dataclass_fields__ if name != "log_alpha"}
    repeated = {name: v.repeat(64, *[1] * (v.dim() - 1)) for name, v in values.items() if v is not None}
    tokens = LossTokens(**repeated, log_alpha=few.log_alpha)
    alone_NV = torch.empty_like(logits_NV[:8])
    cpp.loss_rows(logits_NV[:8], few, LossSettings(), alone_NV)
    cpp.loss_rows(logits_NV, tokens, LossSettings(), logits_NV)
    assert torch.equal(logits_NV.view(64, 8, -1), alone_NV.expand(64, -1, -1))


@pytest.mark.parametrize("tail", [True, False], ids=["tail", "no tail"])
def test_a_student_at_its_teachers_keeps_a_small_tail_exact(tail: bool) -> None:
    """The student's mass off the support is 1e-9: 1 - sum would be 0."""
    logits_NV = torch.full((2, 300), -16.0)
    logits_NV[:, :4] = torch.tensor([3.0, 2.0, 1.0, 0.0])
    logits_NV[1] += 1000.0
    logps_NS = logits_NV[:, :4].double().log_softmax(-1).sub(1e-3).float()
    target = SparseTarget(torch.arange(4).expand(2, 4), logps_NS)
    tokens = cpp_rows.random_tokens(logits_NV, target, policy=False)
    assert_loss(logits_NV, tokens, LossSettings(tail=tail))


def hostile_logits() -> dict[str, Tensor]:
    plain_V = cpp_rows.random_logits(1, 3000, torch.float32)[0]
    cases = {"plain": plain_V, "all -inf": torch.full((3000,), -INF), "all equal": torch.full((3000,), 7.25)}
    for name, at, value in (
        ("nan first", 0, math.nan),
        ("nan last", 2999, math.nan),
        ("+inf", 5, INF),
        ("+inf in the support", 1, INF),
        ("-inf in the support", 1, -INF),
        ("-inf at the token", 7, -INF),
        ("one huge", 2500, 3.0e38),
        ("one huge in the support", 1, 1.0e7),
        ("one huge and negative", 2500, -3.0e38),
    ):
        cases[name] = plain_V.clone()
        cases[name][at] = value
    cases["only the support"] = torch.full((3000,), -INF)
    cases["only the support"][:4] = torch.tensor([1.0, 0.0, -1.0, -2.0])
    cases["only the last block"] = torch.full((3000,), -INF)
    cases["only the last block"][2900:] = plain_V[2900:]
    cases["nan among -inf"] = torch.full((3000,), -INF)
    cases["nan among -inf"][2800] = math.nan
    cases["ascending"] = plain_V.sort().values
    cases["far from 0"] = plain_V.double().add(2.0**18).float()
    cases["very far from 0"] = plain_V * 1.0e6
    cases["two huge and equal"] = plain_V.clone()
    cases["two huge and equal"][[1, 2500]] = 1.0e9
    return cases


@pytest.mark.parametrize("inactive", ["", "pg_weight_N", "kl_weight_N", "every weight"])
@pytest.mark.parametrize("tail", [True, False], ids=["tail", "no tail"])
@pytest.mark.parametrize("case", hostile_logits())
def test_hostile_rows(case: str, tail: bool, inactive: str) -> None:
    """The hostile row between two plain ones, as the reference has it in float64."""
    plain_V = hostile_logits()["plain"]
    logits_NV = torch.stack([plain_V, hostile_logits()[case], plain_V])
    target = SparseTarget(
        torch.tensor([[0, 1, 2, 3, 1, 2999999]]).expand(3, 6),
        torch.tensor([0.4, 0.2, 0.1, 0.05, 0.05, 0.0]).log().expand(3, 6),
    )
    one_N = torch.ones(3)
    tokens = LossTokens(
        token_ids_N=torch.full((3,), 7),
        adv_N=-one_N,
        pg_weight_N=0.5 * one_N,
        old_logp_N=-9.0 * one_N,
        kl_weight_N=0.25 * one_N,
        ent_weight_N=0.125 * one_N,
        target_ids_NS=target.ids_NS,
        target_logps_NS=target.logps_NS,
    )
    zeros = ("pg_weight_N", "kl_weight_N", "ent_weight_N") if inactive == "every weight" else (inactive,)
    tokens = replace(tokens, **{name: 0.0 * one_N for name in zeros if name})
    for settings in (LossSettings(tail=tail), LossSettings(tail=tail, entropy_coef=0.1, kl_temperature=0.8)):
        terms, grad_NV = loss(logits_NV, tokens, settings)
        true_terms, true_NV = float64.true_loss(logits_NV, tokens, settings)
        cpp_rows.assert_terms(terms, true_terms)
        cpp_rows.assert_gradient(grad_NV, true_NV, cpp_rows.loss_magnitude(logits_NV, tokens, settings))
        assert torch.equal(grad_NV[0], grad_NV[2]), "a row next to a hostile one"


def test_minus_infinity_has_gradient_exactly_zero() -> None:
    for dtype in DTYPES:
        logits_NV = cpp_rows.random_logits(4, 500, dtype)
        logits_NV[:, 100:400] = -INF
        tokens = cpp_rows.random_tokens(logits_NV[:, :100], None, policy=False)
        for settings in (LossSettings(), LossSettings(entropy_coef=1.0)):
            assert not loss(logits_NV, tokens, settings)[1][:, 100:400].any()


def test_idle_rows_are_zero_whatever_they_hold() -> None:
    logits_NV = cpp_rows.random_logits(4, 50, torch.bfloat16)
    logits_NV[1] = math.nan
    target = cpp_rows.target_of("teachers", 4, 50, 4, True)
    tokens = cpp_rows.random_tokens(logits_NV, target, policy=False)
    zero = {f"{name}_weight_N": torch.zeros(4) for name in ("pg", "kl", "ent")}
    terms, grad_NV = loss(logits_NV, replace(tokens, **zero), LossSettings())
    assert not grad_NV.any() and not any(getattr(terms, name).any() for name in TERMS)
    # A weight that feeds statistics alone: the terms are there, the gradient is exactly 0.
    counted = replace(tokens, **zero | {"ent_weight_N": torch.ones(4)})
    terms, grad_NV = loss(logits_NV, counted, LossSettings())
    assert not grad_NV.any() and terms.entropy_N[1].isnan() and bool((terms.entropy_N[2:] > 0).all())


def test_rows_may_be_strided() -> None:
    logits_NV = cpp_rows.random_logits(12, 300, torch.float32)
    view_NV = logits_NV[::2, 17:250]
    target = cpp_rows.target_of("given", 6, 233, 8, False)
    assert isinstance(target, SparseTarget)
    tokens = cpp_rows.random_tokens(view_NV, target)
    wide = replace(
        tokens,
        target_ids_NS=target.ids_NS.repeat_interleave(2, 1)[:, ::2].int(),
        target_logps_NS=target.logps_NS.T.contiguous().T,
        pg_weight_N=tokens.pg_weight_N[:, None].repeat(1, 3)[:, 1],
        adv_N=tokens.adv_N.double(),
    )
    expected_NV = torch.empty(6, 233)
    expected = cpp.loss_rows(view_NV.contiguous(), tokens, LossSettings(), expected_NV)
    out_NV = torch.full((12, 300), math.nan)
    got = cpp.loss_rows(view_NV, wide, LossSettings(), out_NV[::2, 17:250])
    assert torch.equal(out_NV[::2, 17:250], expected_NV)
    assert torch.equal(got.kl_N, expected.kl_N)
    out_NV[::2, 17:250] = math.nan
    assert bool(out_NV.isnan().all()), "written outside the rows"


@pytest.mark.parametrize("n_vocab", [265, 70000], ids="V{}".format)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_result_depends_on_neither_threads_nor_other_rows_nor_the_call(
    dtype: torch.dtype, n_vocab: int
) -> None:
    logits_NV = cpp_rows.random_logits(37, n_vocab, dtype)
    target = cpp_rows.target_of("teachers", 37, n_vocab, 16, True)
    tokens = cpp_rows.random_tokens(logits_NV, target)
    settings = LossSettings(entropy_coef=0.01)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        terms, grad_NV = loss(logits_NV, tokens, settings)
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            again, again_NV = loss(logits_NV, tokens, settings)
            assert torch.equal(again_NV, grad_NV)
            assert all(torch.equal(getattr(again, name), getattr(terms, name)) for name in TERMS)
    finally:
        torch.set_num_threads(threads)
    for n in (0, 20, 36):
        one, one_NV = loss(logits_NV[n : n + 1], tokens.rows(n, n + 1), settings)
        assert torch.equal(one_NV, grad_NV[n : n + 1])
        assert all(torch.equal(getattr(one, name), getattr(terms, name)[n : n + 1]) for name in TERMS)


def test_empty_shapes() -> None:
    none_NV = torch.empty(0, 10)
    target = cpp_rows.target_of("given", 0, 10, 4, True)
    tokens = cpp_rows.random_tokens(none_NV, target)
    assert all(
        getattr(cpp.loss_rows(none_NV, tokens, LossSettings(), none_NV), name).shape == (0,) for name in TERMS
    )
    logits_NV = cpp_rows.random_logits(3, 10, torch.float32)
    empty = SparseTarget(torch.empty(3, 0, dtype=torch.int64), torch.empty(3, 0))
    tokens = cpp_rows.random_tokens(logits_NV, None, policy=False)
    tokens = replace(tokens, target_ids_NS=empty.ids_NS, target_logps_NS=empty.logps_NS)
    for tail in (True, False):
        assert_loss(logits_NV, tokens, LossSettings(tail=tail))


def test_wrong_arguments_are_named() -> None:
    logits_NV = cpp_rows.random_logits(3, 10, torch.float32)
    target = cpp_rows.target_of("given", 3, 10, 4, True)
    assert isinstance(target, SparseTarget)
    tokens = cpp_rows.random_tokens(logits_NV, target)
    bad_ids_NS = target.ids_NS.clone()
    bad_ids_NS[2, 0] = 10
    for change, message in (
        ({"target_ids_NS": bad_ids_NS}, "ids of row 2 hold an id outside 0 to V - 1 = 9"),
        ({"token_ids_N": torch.tensor([0, 1, -1])}, r"token_ids\[2\] is -1, expected 0 to V - 1 = 9"),
        ({"adv_N": torch.zeros(2)}, r"adv has to be a CPU tensor of shape \(N,\) = \(3,\)"),
        ({"target_logps_NS": target.logps_NS[:, :3]}, "logps differs from ids in dimension 1"),
    ):
        with pytest.raises(RuntimeError, match="loss_rows_cpu: .*" + message):
            cpp.loss_rows(logits_NV, replace(tokens, **change), LossSettings(), None)
    with pytest.raises(RuntimeError, match="grad differs from logits in shape or dtype"):
        cpp.loss_rows(logits_NV, tokens, LossSettings(), torch.empty(3, 10, dtype=torch.bfloat16))


def test_serves_the_same_terms_as_the_reference_in_float32() -> None:
    logits_NV = cpp_rows.random_logits(50, 265, torch.float32)
    target = cpp_rows.target_of("teachers", 50, 265, 16, True)
    tokens = cpp_rows.random_tokens(logits_NV, target)
    ours_NV, theirs_NV = torch.empty_like(logits_NV), torch.empty_like(logits_NV)
    ours = cpp.loss_rows(logits_NV, tokens, LossSettings(), ours_NV)
    theirs = reference_loss.loss_rows(logits_NV, tokens, LossSettings(), theirs_NV)
    torch.testing.assert_close(ours_NV, theirs_NV, rtol=1e-5, atol=1e-6)
    for name in TERMS:
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=1e-5, atol=1e-5)
