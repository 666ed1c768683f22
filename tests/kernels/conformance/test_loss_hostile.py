"""loss_rows of every backend on infinities and NaN: as the definition has them in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from smopd.kernels.types import LossSettings, LossTokens
from tests.kernels import backends, cases, float64
from tests.kernels.cases import LossCase, check_loss, loss_case, run_loss
from tests.kernels.float64 import TERMS

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of the interpreter's numpy
    pytest.mark.usefixtures("poisoned_memory"),
]
INF, NAN = math.inf, math.nan
each_backend = backends.each("loss_rows")
tails = pytest.mark.parametrize("tail", [True, False], ids=["tail", "paper"])
WEIGHTS = ("pg_weight_N", "kl_weight_N", "ent_weight_N")
V = 3000  # more than a block


def hostile_rows() -> dict[str, Tensor]:
    """The target is on ids 0 to 3, the token is 7."""
    plain_V = cases.random_logits(1, V)[0]
    rows = {"plain": plain_V, "all -inf": torch.full((V,), -INF), "all equal": torch.full((V,), 7.25)}
    for name, at, value in (
        ("nan first", 0, NAN),
        ("nan last", V - 1, NAN),
        ("nan in the middle", 1500, NAN),
        ("+inf", 5, INF),
        ("+inf in the support", 1, INF),
        ("-inf in the support", 1, -INF),
        ("-inf at the token", 7, -INF),
        ("one huge", 2500, 3.0e38),
        ("one huge in the support", 1, 1.0e7),
        ("one huge and negative", 2500, -3.0e38),
    ):
        rows[name] = plain_V.clone()
        rows[name][at] = value
    rows["only the support"] = torch.full((V,), -INF)
    rows["only the support"][:4] = torch.tensor([1.0, 0.0, -1.0, -2.0])
    rows["support over the lowest"] = torch.full((V,), torch.finfo(torch.float32).min)
    rows["support over the lowest"][:8] = plain_V[:8]
    rows["only the last block"] = torch.full((V,), -INF)
    rows["only the last block"][2900:] = plain_V[2900:]
    rows["only the first block"] = plain_V.clone()
    rows["only the first block"][40:] = -INF
    rows["every other"] = plain_V.clone()
    rows["every other"][8::2] = -INF
    rows["nan among -inf"] = torch.full((V,), -INF)
    rows["nan among -inf"][2800] = NAN
    rows["ascending"] = plain_V.sort().values
    rows["far from 0"] = plain_V.double().add(2.0**18).float()
    rows["very far from 0"] = plain_V * 1.0e6
    rows["far"] = plain_V * 1.0e3
    rows["two huge and equal"] = plain_V.clone()
    rows["two huge and equal"][[1, 2500]] = 1.0e9
    return rows


# Of whom no digits are promised. x / T or x log2(e) of fp32, not fused, loses those of logits far from 0, and
# of the largest it is infinite; x - max of 1e7 loses all that is off the support.
HUGE = ("one huge", "one huge in the support", "far from 0")
WITHOUT = {name: () if name == "cpp" else HUGE for name in backends.ALL}


def hostile_case(rows: dict[str, Tensor], inactive: tuple[str, ...], settings: LossSettings) -> LossCase:
    n_rows = len(rows)
    one_N = torch.ones(n_rows)
    weights = {"pg_weight_N": 0.5 * one_N, "kl_weight_N": 0.25 * one_N, "ent_weight_N": 0.125 * one_N}
    tokens = LossTokens(
        token_ids_N=torch.full((n_rows,), 7),
        adv_N=-one_N,
        old_logp_N=-9.0 * one_N,
        target_ids_NS=torch.tensor([[0, 1, 2, 3, 1, 2_999_999]]).expand(n_rows, 6),
        target_logps_NS=torch.tensor([0.4, 0.2, 0.1, 0.05, 0.05, 0.0]).log().expand(n_rows, 6),
        **weights | dict.fromkeys(inactive, 0.0 * one_N),
    )
    return LossCase(torch.stack([*rows.values()]), tokens, settings, float64.defined_loss)


@each_backend
@pytest.mark.parametrize("inactive", [(), ("pg_weight_N",), ("kl_weight_N",), WEIGHTS], ids=str)
@tails
def test_hostile_rows(tail: bool, inactive: tuple[str, ...], backend: str, request) -> None:
    """Each of them between others, and a plain one not changed by them."""
    backends.leave_to_a_gpu(backend, bool(inactive))
    rows = {name: row for name, row in hostile_rows().items() if name not in WITHOUT[backend]}
    if backend == "triton" and tail:
        request.getfixturevalue("streamed")
    rows["plain again"] = rows["plain"]
    entropy = LossSettings(tail=tail, entropy_coef=0.1)
    settings = [LossSettings(tail=tail), entropy, replace(entropy, kl_temperature=0.8)]
    if backends.interpreted(backend):
        settings = settings[2:] if tail else settings[1:2]
    for setting in settings:
        _, grad_NV = check_loss(backend, hostile_case(rows, inactive, setting), most=len(rows))
        assert grad_NV is not None and torch.equal(grad_NV[0], grad_NV[-1]), "a row beside hostile ones"


@each_backend
@pytest.mark.parametrize("value", [NAN, -INF, 1000.0], ids=str)
def test_a_hostile_support(value: float, backend: str) -> None:
    """Teachers' log-probabilities, and the student's logits of them, far from the others or not there."""
    value = value if backend == "cpp" else min(value, 20.0)  # fp32 has no digits beside 1000
    for tail, two in ((True, False), (False, True)):
        case = loss_case(
            (3, 4301, 2, 9), target="repeats", tail=tail, temperatures=(1.0, 0.7 if two else 1.0)
        )
        ids_NS, logps_NS = case.tokens.target_ids_NS, case.tokens.target_logps_NS.clone()
        check_loss(backend, case.but(case.logits_NV.scatter(1, ids_NS[:, :2], value)))
        if not value > 0:
            logps_NS[1, 0] = logps_NS[2] = value
            check_loss(backend, case.but(target_logps_NS=logps_NS))


@each_backend
@pytest.mark.parametrize("bad", [NAN, INF, -INF], ids=str)
def test_a_token_that_counts_nowhere_is_zero_whatever_it_holds(bad: float, backend: str) -> None:
    """Its logits, its ids and its target's; and the others' rows do not change."""
    case = loss_case((4, 1271, 2, 16), "bf16", entropy=True, reverse=None)
    idle_N = torch.tensor([False, True, False, True])
    columns = {name: torch.where(idle_N, 0.0, 0.5 + getattr(case.tokens, name)) for name in WEIGHTS}
    want, want_NV = run_loss(backend, case.but(**columns))
    logits_NV = torch.where(idle_N[:, None], bad, case.logits_NV)
    ids = {"token_ids_N": torch.where(idle_N, -100, case.tokens.token_ids_N)}
    ids["teacher_ids_NMS"] = torch.where(idle_N[:, None, None], 10**6, case.tokens.teacher_ids_NMS)
    terms, grad_NV = run_loss(backend, case.but(logits_NV, **columns | ids))
    assert torch.equal(grad_NV, want_NV) and not grad_NV[idle_N].any() and not grad_NV[idle_N].signbit().any()
    for name in TERMS:
        column_N = getattr(terms, name)
        assert torch.equal(column_N, getattr(want, name)) and not column_N[idle_N].any()


@each_backend
def test_a_token_that_is_only_observed_has_terms_and_no_gradient(backend: str) -> None:
    """A weight that feeds statistics alone, even where a logit is NaN."""
    case = loss_case((3, 1271, 2, 16), "bf16", opd_coef=0.0, reverse=None)
    logits_NV = case.logits_NV.clone()
    logits_NV[1, 5] = NAN
    zero_N, one_N = torch.zeros(3), torch.ones(3)
    for weights in ((zero_N, one_N, one_N), (zero_N, zero_N, one_N)):
        observed = case.but(logits_NV, **dict(zip(WEIGHTS, weights, strict=True)))
        terms, grad_NV = check_loss(backend, observed, most=3)
        assert not grad_NV.any() and not grad_NV.signbit().any()
        assert terms.entropy_N.isnan().tolist() == terms.kl_N.isnan().tolist() == [False, True, False]
        assert bool((terms.entropy_N[::2] > 0).all())


@each_backend
@pytest.mark.parametrize(
    ("target", "where", "tail"),
    [
        ("repeats", "target_logps_NS", True),
        ("repeats", "target_logps_NS", False),
        ("pooled", "teacher_logps_NMS", False),
        ("merged", "teacher_logps_NMS", True),
        ("many", "teacher_logps_NMS", True),
        ("pooled", "log_alpha", True),
        ("merged", "log_alpha", False),
    ],
)
def test_a_nan_of_the_teachers_is_not_lost(target: str, where: str, tail: bool, backend: str) -> None:
    """It is in the row's KL, masses and gradient, and in nothing else."""
    case = loss_case((3, 211, 2, 9), target=target, tail=tail, entropy=True, reverse=None)
    broken = getattr(case.tokens, where).clone()
    broken[0, ..., 1] = NAN
    one = {name: torch.ones(3) for name in WEIGHTS}
    terms, grad_NV = check_loss(backend, case.but(**{where: broken}, **one), most=3)
    for name in ("kl_N", "teacher_mass_N", "student_mass_N"):
        assert getattr(terms, name).isnan().tolist() == [True, False, False]
    assert grad_NV.isnan().all(1).tolist() == grad_NV.isnan().any(1).tolist() == [True, False, False]
    assert bool(terms.entropy_N.isfinite().all())


@each_backend
@pytest.mark.parametrize("dtype", cases.HALF)
@pytest.mark.parametrize("target", ["given", "merged"])
def test_no_nan_of_a_teacher_where_the_kl_has_no_coefficient(target: str, dtype: str, backend: str) -> None:
    """The gradient is that of an empty slot, bit for bit in C++; the KL says NaN."""
    backends.leave_to_a_gpu(backend, dtype != "fp32")  # it is the target's path, not the logits'
    name = {"given": "target_logps_NS", "merged": "teacher_logps_NMS"}[target]
    for tail, kl in ((True, 1.0), (False, 0.7)):
        case = loss_case((3, 2500, 2, 6), dtype, target, tail, True, (1.0, kl))
        settings = replace(case.settings, kappa=12)  # all of the union: no entry is cut for a NaN
        tokens = replace(case.tokens, kl_weight_N=torch.tensor([1.0, 0.0, 1.0]))
        if (
            target == "merged"
        ):  # an id that no other teacher has: with one that has, the slot would not be empty
            ids_NMS = tokens.teacher_ids_NMS.clone()
            ids_NMS[1, 0, 0] = next(i for i in range(2500) if not bool((ids_NMS[1] == i).any()))
            tokens = replace(tokens, teacher_ids_NMS=ids_NMS)
        case = LossCase(case.logits_NV, tokens, settings, float64.defined_loss)
        off = LossCase(case.logits_NV, case.tokens, replace(case.settings, opd_coef=0.0), case.of)
        for given in (case, off):
            broken, empty = (given.but(**{name: entry(given, name, value)}) for value in (NAN, -INF))
            (terms, grad_NV), (_, want_NV) = run_loss(backend, broken), run_loss(backend, empty)
            assert terms.kl_N.isnan().tolist() == [False, True, False] and bool(grad_NV[1].any())
            if backend == "cpp":
                assert torch.equal(grad_NV, want_NV)
            torch.testing.assert_close(grad_NV.float(), want_NV.float(), rtol=1e-4, atol=1e-8)
        heard = case.but(kl_weight_N=torch.tensor([1.0, 1e-30, 1.0]), **{name: entry(case, name, NAN)})
        assert bool(run_loss(backend, heard)[1][1].isnan().all())


def entry(case: LossCase, name: str, value: Tensor | float, row: int = 1) -> Tensor:
    """The column, the first of its row's entries being value."""
    column = getattr(case.tokens, name).clone()
    column[row].view(-1)[:1] = value
    return column


@each_backend
@pytest.mark.parametrize("payload", [0x7FFFFFFF, -1], ids=hex)
@pytest.mark.parametrize("dtype", cases.HALF)
def test_a_nan_of_any_payload_reaches_the_whole_row(dtype: str, payload: int, backend: str) -> None:
    """Rounding one with all bits set to bf16 carries out of the exponent. In no other row is there any."""
    backends.leave_to_a_gpu(backend, dtype != "bf16")  # rounding to it is what may carry
    nan = torch.tensor(payload, dtype=torch.int32).view(torch.float32)
    names = ["adv_N", "pg_weight_N", "old_logp_N", "kl_weight_N", "reverse_adv_N", "reverse_weight_N"]
    for entropy, two in ((False, False), (True, True)):
        case = loss_case(
            (3, 2500, 2, 6), dtype, "given", True, entropy, (0.7, 1.0 if two else 0.7), reverse="ppo"
        )
        one_N = torch.ones(3)
        case = case.but(**dict.fromkeys((*WEIGHTS, "reverse_weight_N"), one_N))
        columns = [*names, "target_logps_NS", *(["ent_weight_N"] if entropy else [])]
        for name in columns[:: 4 if backends.interpreted(backend) else 1]:
            _, grad_NV = run_loss(backend, case.but(**{name: entry(case, name, nan, 0)}))
            assert bool(grad_NV[0].isnan().all()), name
            assert bool(grad_NV[1:].isfinite().all()), name
