"""loss_rows of every backend: terms and gradient against float64, whatever the options, shapes and memory."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from smopd.kernels.types import (
    CLIP_DUAL,
    CLIP_HIGH,
    CLIP_LOG_RATIO,
    CLIP_LOW,
    CLIP_REVERSE_HIGH,
    CLIP_REVERSE_LOW,
    LossSettings,
    LossTokens,
    SparseTarget,
    TokenTerms,
)
from tests.kernels import backends, cases, float64
from tests.kernels.cases import LossCase, check_loss, loss_case, run_loss
from tests.kernels.float64 import TERMS
from tests.kernels.pairwise import label, pairwise

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
    pytest.mark.usefixtures("poisoned_memory"),
]
INTERPRETED = ("triton", "triton split")
each_backend = backends.each("loss_rows")
tails = pytest.mark.parametrize("tail", [True, False], ids=["tail", "paper"])
TEMPERATURES = ((1.0, 1.0), (0.7, 0.7), (0.7, 1.3))
FACTORS = {
    "shape": (cases.SHAPES[1], cases.SHAPES[0], cases.SHAPES[2]),
    "dtype": ("bf16", "fp16", "fp32"),
    "target": cases.TARGETS,
    "tail": (False, True),
    "entropy": (False, True),
    "temperatures": TEMPERATURES,
    "dual": (False, True),
    "reverse": (None, "paper", "ppo"),
    "old": (False, True),
    "ids": (torch.int32, torch.int64),
    "gradient": ("own", "in place", "none"),
    "layout": cases.LAYOUTS,
    "streamed": (False, True),
}
OF_THE_RUN = ("gradient", "layout", "streamed")


@each_backend
@pytest.mark.parametrize("row", pairwise(FACTORS), ids=label)
def test_equals_float64(row: dict, backend: str, request: pytest.FixtureRequest) -> None:
    if row["streamed"] and backend == "triton":
        request.getfixturevalue("streamed")
    case = loss_case(**{name: value for name, value in row.items() if name not in OF_THE_RUN})
    check_loss(backend, case, row["gradient"], row["layout"])


@backends.each("loss_rows", but=INTERPRETED)
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("target", cases.TARGETS)
def test_every_combination_that_chooses_a_path(target: str, dtype: str, backend: str) -> None:
    """In float64 too, where the backend has it; row 6 counts nowhere."""
    if dtype == "fp64" and backend == "cpp":
        pytest.skip("float64 is the reference's: dispatch gives it no other")
    shape = (7, 211, 2, 9)
    for tail, entropy, temperatures in itertools.product((True, False), (True, False), TEMPERATURES):
        options = {"tail": tail, "entropy": entropy, "temperatures": temperatures, "dual": tail}
        options["opd_coef"] = 0.0 if entropy and temperatures[1] == 0.7 else 0.7
        _, grad_NV = check_loss(backend, loss_case(shape, dtype, target, **options))
        assert grad_NV is not None and not grad_NV[6].any() and not grad_NV[6].signbit().any()


@each_backend
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("target", "tail"), [("merged", True), ("pooled", False)])
def test_a_whole_vocabulary(target: str, tail: bool, dtype: str, backend: str) -> None:
    """Rows of it at once, in place; what is compared are rows from the first to the last."""
    backends.leave_to_a_gpu(backend, dtype == "fp32" and tail)
    case = whole_vocabulary(dtype, target, tail)
    rows = backends.rows_for(backend, len(case.logits_NV), 2)
    part = case.at(rows)
    terms, grad_NV = run_loss(backend, part, "in place")
    assert grad_NV is not None and bool(grad_NV.isfinite().all())
    seen = torch.tensor([0, len(rows) // 2, len(rows) - 1]).unique()
    true = part.at(seen).truth
    float64.check_terms(TokenTerms(*(getattr(terms, name)[seen] for name in TERMS)), true.terms)
    float64.check_gradient(grad_NV[seen], true, backend)


def whole_vocabulary(dtype: str, target: str, tail: bool) -> LossCase:
    two = (1.0, 1.0) if tail else (1.0, 0.7)
    return loss_case((*cases.WHOLE, 2, 16), dtype, target, tail, temperatures=two, entropy=tail)


@each_backend
@pytest.mark.parametrize("target", ["given", "repeats", "pooled", "merged"])
def test_any_kappa(target: str, backend: str) -> None:
    for kappa in (0, 3, 128) if backends.interpreted(backend) else (0, 1, 3, 64, 128):
        check_loss(backend, loss_case((2, 1271, 2, kappa), target=target))


def replace_settings(case: LossCase, **settings) -> LossCase:
    return LossCase(case.logits_NV, case.tokens, replace(case.settings, **settings))


SUPPORTS = {
    "adjacent": torch.stack([torch.arange(128), torch.arange(2600 - 128, 2600)]),
    "ends of blocks": torch.arange(16)[None].repeat(2, 1) * 128 + 127,
    "far apart": torch.arange(16)[None].repeat(2, 1) * 170 + 2,
    "all": torch.arange(2600).repeat(2, 1),
}


@each_backend
@pytest.mark.parametrize("place", SUPPORTS)
def test_support_anywhere(place: str, backend: str, request: pytest.FixtureRequest) -> None:
    """All of it: there is nothing off the support, and teacher mass where the student has none."""
    ids_NS = SUPPORTS[place]
    n_vocab = 7 if place == "all" else 2600
    if place != "all" and backend == "triton":
        request.getfixturevalue("streamed")
    ids_NS = ids_NS[:, :n_vocab]
    logps_NS = cases.random_logits(2, ids_NS.shape[1], seed=4).log_softmax(-1)
    case = loss_case((2, n_vocab, 1, 3), target="given", temperatures=(0.7, 1.0), entropy=True)
    target = {"target_ids_NS": ids_NS, "target_logps_NS": logps_NS - (0.0 if place == "all" else 0.2)}
    check_loss(backend, LossCase(case.logits_NV, replace(case.tokens, **target), case.settings))
    if place == "all":
        short = case.but(**target | {"target_logps_NS": logps_NS - 0.5})
        assert bool((run_loss(backend, short)[0].kl_N == math.inf).all())


@each_backend
@tails
def test_given_targets_of_every_mass(tail: bool, backend: str) -> None:
    """Repeats, an empty row, all of the vocabulary, a mass of 1 and one above 1; no entry at all."""
    q_NS = torch.tensor(
        [
            [0.3, 0.2, 0.1, 0.1, 0.05, 0.0],
            [0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
            [0.1, 0.2, 0.1, 0.1, 0.1, 0.1],
            [0.5, 0.25, 0.125, 0.125, 0.0, 0.0],
            [0.6, 0.6, 0.0, 0.0, 0.0, 0.0],
        ]
    )
    nine = cases.NOWHERE[0]
    ids = [[3, 3, 0, 3, 1, -7], [nine] * 6, [5, 4, 3, 2, 1, 0], [0, 1, 2, 0, 99, 99], [2, 1, 7, 7, 7, 7]]
    case = loss_case((5, 6, 1, 3), target="given", tail=tail, reverse=None)
    target = {"target_ids_NS": torch.tensor(ids), "target_logps_NS": q_NS.log()}
    of = float64.defined_loss if tail else float64.true_loss  # row 2 has no tail: 0.3 of q meets nothing
    check_loss(backend, LossCase(case.logits_NV, replace(case.tokens, **target), case.settings, of), most=5)
    none = {"target_ids_NS": torch.zeros(5, 0, dtype=torch.int64), "target_logps_NS": torch.zeros(5, 0)}
    check_loss(backend, LossCase(case.logits_NV, replace(case.tokens, **none), case.settings))


@each_backend
def test_a_small_tail_keeps_its_digits(backend: str) -> None:
    """The student's mass off the support is 1e-12: 1 - sum would be 0."""
    logits_NV = torch.full((2, 300), -30.0)
    logits_NV[:, :4] = torch.tensor([3.0, 2.0, 1.0, 0.0])
    if not backends.interpreted(backend):  # which has no fused multiply-add
        logits_NV[1] += 1000.0
    logps_NS = logits_NV[:, :4].double().log_softmax(-1).sub(1e-3).float()
    given = SparseTarget(torch.arange(4).expand(2, 4), logps_NS)
    tokens = replace(
        cases.random_tokens(logits_NV, given, old=False, reverse=False),
        kl_weight_N=torch.ones(2),
        pg_weight_N=torch.zeros(2),
    )
    one = backend.startswith("triton")  # whose bound of p alone is 2^-20 of more
    for tail in (True, False)[: 1 if one else 2]:
        case = LossCase(logits_NV, tokens, LossSettings(tail=tail))
        assert bool((1.0 - case.truth.terms.student_mass_N < 1e-11).all())
        _, grad_NV = check_loss(backend, case)
        assert grad_NV is not None
        torch.testing.assert_close(grad_NV[:, 4:].double(), case.truth.grad_NV[:, 4:], rtol=1e-5, atol=0.0)


POLICY = [  # adv, ratio, dual clip, value, bits, whether the gradient is 0
    (2.0, 1.0, None, -2.0, 0, False),
    (2.0, 1.5, None, -2.4, CLIP_HIGH, True),
    (2.0, 0.5, None, -1.0, 0, False),
    (-2.0, 0.5, None, 1.6, CLIP_LOW, True),
    (-2.0, 1.5, None, 3.0, 0, False),
    (-2.0, 9.0, None, 18.0, 0, False),
    (-2.0, math.exp(25.0), None, 2.0 * math.exp(20.0), CLIP_LOG_RATIO, True),
    (2.0, math.exp(25.0), None, -2.4, CLIP_HIGH | CLIP_LOG_RATIO, True),
    (2.0, math.exp(-25.0), None, -2.0 * math.exp(-20.0), CLIP_LOG_RATIO, True),
    (2.0, 9.0, 3.0, -2.4, CLIP_HIGH, True),
    (-2.0, 9.0, 3.0, 6.0, CLIP_DUAL, True),
    (0.0, 9.0, 3.0, 0.0, 0, True),
]
REVERSE = [  # surrogate, adv, ratio, value, bits, whether the gradient is 0
    ("paper", 2.0, 1.0, -2.0, 0, False),
    ("paper", 2.0, 0.5, -1.6, CLIP_REVERSE_LOW, True),
    ("paper", -2.0, 1.5, 2.4, CLIP_REVERSE_HIGH, True),
    ("paper", 2.0, 1.5, -2.4, CLIP_REVERSE_HIGH, True),
    ("ppo", 2.0, 0.5, -1.0, 0, False),
    ("ppo", -2.0, 1.5, 3.0, 0, False),
    ("ppo", 2.0, 1.5, -2.4, CLIP_REVERSE_HIGH, True),
    ("ppo", -2.0, 0.5, 1.6, CLIP_REVERSE_LOW, True),
]


@each_backend
@pytest.mark.parametrize("dual", [None, 3.0])
def test_each_case_of_the_clip(dual: float | None, backend: str) -> None:
    table = [row for row in POLICY if row[2] == dual]
    advs, ratios, _, values, bits, flat = zip(*table, strict=True)
    logits_NV, columns = policy_rows(ratios)
    tokens = LossTokens(adv_N=torch.tensor(advs), pg_weight_N=torch.ones(len(table)), **columns)
    case = LossCase(logits_NV, tokens, LossSettings(dual_clip=dual))
    terms, grad_NV = check_loss(backend, case, most=len(table))
    torch.testing.assert_close(terms.surrogate_N, torch.tensor(values), rtol=1e-5, atol=1e-6)
    assert terms.clipped_N.tolist() == list(bits)
    assert (~grad_NV.any(1)).tolist() == list(flat)


@each_backend
@pytest.mark.parametrize("surrogate", ["paper", "ppo"])
def test_each_case_of_the_reverse_term(surrogate: str, backend: str) -> None:
    table = [row for row in REVERSE if row[0] == surrogate]
    _, advs, ratios, values, bits, flat = zip(*table, strict=True)
    logits_NV, columns = policy_rows(ratios)
    one_N, zero_N = torch.ones(len(table)), torch.zeros(len(table))
    columns |= {"reverse_adv_N": torch.tensor(advs), "reverse_weight_N": one_N}
    tokens = LossTokens(adv_N=zero_N, pg_weight_N=one_N, **columns)
    settings = LossSettings(reverse_kl_surrogate=surrogate)
    terms, grad_NV = check_loss(backend, LossCase(logits_NV, tokens, settings), most=len(table))
    torch.testing.assert_close(terms.reverse_N, torch.tensor(values), rtol=1e-5, atol=1e-6)
    assert terms.clipped_N.tolist() == list(bits)
    assert (~grad_NV.any(1)).tolist() == list(flat)


def policy_rows(ratios: tuple[float, ...]) -> tuple[torch.Tensor, dict]:
    logits_NV = cases.random_logits(len(ratios), 5)
    logp_N = logits_NV.double().log_softmax(-1)[:, 2]
    old_N = logp_N - torch.tensor(ratios, dtype=torch.float64).log()
    # A ratio of 1 is one of float32: the old log-probability is rounded.
    return logits_NV, {"token_ids_N": torch.full((len(ratios),), 2), "old_logp_N": old_N.float()}


@backends.each("loss_rows", but=INTERPRETED)  # the interpreter truncates what it stores
@tails
def test_a_bf16_gradient_is_never_worse_than_eager(tail: bool, backend: str) -> None:
    """In no row, by its norm; eager is the objective's own lines, in bf16."""
    case = loss_case((9, 265, 2, 8), "bf16", tail=tail, entropy=True, old=False, reverse=None)
    leaf_NV = case.logits_NV.clone().requires_grad_()
    (eager_NV,) = torch.autograd.grad(float64.loss(leaf_NV, case.tokens, case.settings)[0], leaf_NV)
    grads = (run_loss(backend, case)[1], eager_NV)
    ours_N, eager_N = ((grad_NV - case.truth.grad_NV).norm(dim=1) for grad_NV in grads)
    assert bool((ours_N <= eager_N).all())


@each_backend
@pytest.mark.parametrize("dtype", cases.HALF)
def test_neither_gradient_nor_place_change_a_bit(dtype: str, backend: str) -> None:
    """No gradient, one of its own, in place; again; a row alone."""
    case = loss_case((13, 2071, 2, 16), dtype, entropy=True, temperatures=(0.7, 1.0))
    case = case.at(backends.rows_for(backend, 13))
    terms, grad_NV = run_loss(backend, case)
    assert backends.same(run_loss(backend, case, "in place"), (terms, grad_NV))
    assert backends.same(run_loss(backend, case, "none")[0], terms)
    assert backends.same(run_loss(backend, case), (terms, grad_NV))
    for n in {0, len(case.logits_NV) - 1}:
        own = torch.tensor([n])
        alone_terms, alone_NV = run_loss(backend, case.at(own))
        assert torch.equal(alone_NV, grad_NV[own])
        assert all(torch.equal(getattr(alone_terms, name), getattr(terms, name)[own]) for name in TERMS)


@each_backend
@pytest.mark.parametrize("gradient", ["own", "in place"])
def test_rows_may_begin_anywhere(gradient: str, backend: str) -> None:
    """To the same bits but for Triton, which reads by what is aligned."""
    for dtype in cases.HALF[:: 2 if backends.interpreted(backend) else 1]:
        case = loss_case((3, 1271, 2, 16), dtype)
        found = check_loss(backend, case, gradient, "inside")
        assert backend.startswith("triton") or backends.same(found, run_loss(backend, case, gradient))


@backends.each("loss_rows", but=("reference", *INTERPRETED))
@pytest.mark.parametrize("n_vocab", [265, 70_000], ids="V{}".format)
def test_threads_do_not_show(n_vocab: int, backend: str, each_number_of_threads) -> None:
    """Rows that come again have the same bits, whichever thread has them."""
    few = loss_case((5, n_vocab, 2, 16), "bf16", entropy=True)
    case = few.at(torch.arange(5).repeat(8))
    results = each_number_of_threads(lambda: run_loss(backend, case))
    assert all(backends.same(result, results[0]) for result in results)
    assert torch.equal(results[0][1].view(8, 5, -1), results[0][1][:5].expand(8, -1, -1))


@each_backend
def test_small_inputs_of_any_stride_and_type(backend: str) -> None:
    case = loss_case((3, 233, 2, 8), target="given")
    tokens = case.tokens
    other = replace(
        tokens,
        target_ids_NS=tokens.target_ids_NS.repeat_interleave(2, 1)[:, ::2],
        target_logps_NS=tokens.target_logps_NS.T.contiguous().T,
        pg_weight_N=tokens.pg_weight_N[:, None].repeat(1, 3)[:, 1],
        adv_N=tokens.adv_N.double(),
        token_ids_N=tokens.token_ids_N.repeat_interleave(2)[::2].int(),
    )
    assert backends.same(
        run_loss(backend, case), run_loss(backend, LossCase(case.logits_NV, other, case.settings))
    )


@each_backend
@pytest.mark.parametrize("target", ["none", "given", "merged"])
def test_no_rows(target: str, backend: str) -> None:
    case = loss_case((3, 40, 2, 4), target=target).at(torch.zeros(0, dtype=torch.int64))
    terms, grad_NV = run_loss(backend, case)
    assert grad_NV is not None and grad_NV.shape == (0, 40)
    for name in TERMS:
        assert getattr(terms, name).shape == (0,)
        assert getattr(terms, name).dtype == (torch.int8 if name == "clipped_N" else torch.float32)


@backends.each("scale_")
@pytest.mark.parametrize("dloss", [1.0, 0.3])
def test_a_gradient_is_scaled_into_another_dtype(dloss: float, backend: str) -> None:
    backends.need(backend)
    at = backends.device(backend)
    grad = torch.randn(50, 9, generator=torch.Generator().manual_seed(0)).to(at)
    before, out = grad.clone(), torch.empty_like(grad, dtype=torch.float16)
    backends.function(backend, "scale_")(grad, torch.tensor(dloss, device=at), out)
    assert torch.equal(out, (before * dloss).half()) and torch.equal(grad, before)
