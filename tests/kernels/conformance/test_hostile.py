"""loss_rows and topk_logprobs on every backend with infinities, NaN and extreme values."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from smopd.kernels.reference import topk as reference
from smopd.kernels.types import LossSettings, LossTokens
from tests.kernels import backends, cases, float64
from tests.kernels.cases import DTYPES, HALF, LossCase, check_loss, loss_case, run_loss
from tests.kernels.float64 import TERMS

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # from numpy in the interpreter
INF, NAN = math.inf, math.nan
each_backend = backends.each("loss_rows")
WEIGHTS = ("pg_weight_N", "kl_weight_N", "ent_weight_N")
V = 3000  # more than a block
SPOTS = {  # of a row whose target is on ids 0 to 3 and whose token is 7
    "nan first": (0, NAN),
    "nan last": (V - 1, NAN),
    "nan in the middle": (1500, NAN),
    "+inf": (5, INF),
    "+inf in the support": (1, INF),
    "-inf in the support": (1, -INF),
    "-inf at the token": (7, -INF),
    "one huge": (2500, 3.0e38),
    "one huge in the support": (1, 1.0e7),
    "one huge and negative": (2500, -3.0e38),
    "two huge and equal": ([1, 2500], 1.0e9),
}
# Only C++ is accurate for these: fp32 x / T or x log2(e) loses digits or overflows without a fused product.
HUGE = ("one huge", "one huge in the support", "far from 0")


def hostile_rows() -> dict[str, Tensor]:
    plain_V, id_V = cases.random_logits(1, V)[0], torch.arange(V)
    spots = {name: plain_V.index_fill(0, torch.tensor(at), value) for name, (at, value) in SPOTS.items()}
    return {
        "plain": plain_V,
        **spots,
        "all -inf": torch.full((V,), -INF),
        "all equal": torch.full((V,), 7.25),
        "only the support": plain_V.where(id_V < 4, -INF),
        "support over the lowest": plain_V.where(id_V < 8, torch.finfo(torch.float32).min),
        "support over -1e30": plain_V.where(id_V < 8, -1.0e30),
        "only the last block": plain_V.where(id_V >= 2900, -INF),
        "only the first block": plain_V.where(id_V < 40, -INF),
        "every other": plain_V.where((id_V < 8) | (id_V % 2 == 1), -INF),
        "nan among -inf": torch.where(id_V == 2800, NAN, -INF),
        "ascending": plain_V.sort().values,
        "far": plain_V * 1.0e3,
        "far from 0": plain_V.double().add(2.0**18).float(),
        "very far from 0": plain_V * 1.0e6,
        "plain again": plain_V,
    }


def hostile_case(rows: list[Tensor], inactive: tuple[str, ...], settings: LossSettings) -> LossCase:
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
    return LossCase(torch.stack(rows), tokens, settings, float64.defined_loss)


@each_backend
@pytest.mark.parametrize("inactive", [(), ("pg_weight_N",), ("kl_weight_N",), WEIGHTS], ids=str)
@pytest.mark.parametrize("tail", [True, False], ids=["tail", "paper"])
def test_hostile_rows(tail: bool, inactive: tuple[str, ...], backend: str, request) -> None:
    """Also, a plain row is not changed by hostile ones."""
    # The interpreter's one setting with tail has two temperatures, which the split kernel does not serve.
    backends.leave_to_a_gpu(backend, bool(inactive) or (tail and backend == "triton split"))
    without = () if backend == "cpp" else HUGE
    rows = [row_V for name, row_V in hostile_rows().items() if name not in without]
    if backend == "triton" and tail:
        request.getfixturevalue("streamed")
    entropy = LossSettings(tail=tail, entropy_coef=0.1)
    settings = [LossSettings(tail=tail), entropy, replace(entropy, kl_temperature=0.8)]
    if backends.interpreted(backend):
        settings = settings[2:] if tail else settings[1:2]
    for setting in settings:
        _, grad_NV = check_loss(backend, hostile_case(rows, inactive, setting), most=len(rows))
        assert grad_NV is not None and torch.equal(grad_NV[0], grad_NV[-1]), "a row beside hostile ones"


@backends.each("topk_logprobs")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_top_kappa_of_hostile_rows(dtype: str, backend: str) -> None:
    """Compared with float64. A NaN comes first, and all log-probabilities of its row are NaN."""
    without = () if backend == "cpp" else (*HUGE, "very far from 0", "two huge and equal")
    rows = torch.stack([row_V for name, row_V in hostile_rows().items() if name not in without])
    rows = rows[backends.rows_for(backend, len(rows), 7)].to(DTYPES[dtype])
    options = {"token_ids_N": torch.arange(len(rows)) * 97 % V}
    got = backends.call(backend, "topk_logprobs", rows, 8, **options)
    true = reference.topk_logprobs(rows.double(), 8, **options)
    close = dict(float64.TERM)
    if backend == "reference":
        close["atol"] += 2.0**-23 * 3e4  # it rounds x - lse
    torch.testing.assert_close(got.logps_NS.double(), true.logps_NS, **close)
    torch.testing.assert_close(got.token_logp_N.double(), true.token_logp_N, **close)
    nan_N = rows.isnan().any(-1)
    assert torch.equal(got.ids_NS[~nan_N], true.ids_NS[~nan_N])
    assert all(len(set(row)) == 8 for row in got.ids_NS.tolist())
    if backend != "reference":  # which does not define the ids
        assert torch.equal(got.ids_NS[nan_N, 0].long(), rows[nan_N].isnan().int().argmax(-1))


@each_backend
def test_a_token_without_weights_is_zero(backend: str) -> None:
    """With bad logits and ids; other rows do not change."""
    case = loss_case((5, 1272, 2, 16), "bf16", entropy=True, reverse=None)
    idle_N, bad_N = torch.tensor([False, True, True, True, False]), torch.tensor([0.0, NAN, INF, -INF, 0.0])
    columns = {name: torch.where(idle_N, 0.0, 0.5 + getattr(case.tokens, name)) for name in WEIGHTS}
    want, want_NV = run_loss(backend, case.but(**columns))
    logits_NV = torch.where(idle_N[:, None], bad_N[:, None].bfloat16(), case.logits_NV)
    ids = {"token_ids_N": torch.where(idle_N, -100, case.tokens.token_ids_N)}
    ids["teacher_ids_NMS"] = torch.where(idle_N[:, None, None], 10**6, case.tokens.teacher_ids_NMS)
    terms, grad_NV = run_loss(backend, case.but(logits_NV, **columns | ids))
    assert torch.equal(grad_NV, want_NV) and not grad_NV[idle_N].any() and not grad_NV[idle_N].signbit().any()
    for name in TERMS:
        column_N = getattr(terms, name)
        assert torch.equal(column_N, getattr(want, name)) and not column_N[idle_N].any()


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
def test_a_nan_of_the_teachers_reaches_the_kl(target: str, where: str, tail: bool, backend: str) -> None:
    """And the masses, and the gradient if the KL has a weight, but nothing else."""
    case = loss_case((3, 212, 2, 9), target=target, tail=tail, entropy=True, reverse=None)
    broken = getattr(case.tokens, where).clone()
    broken[:2, ..., 1] = NAN
    weights = dict.fromkeys(WEIGHTS, torch.ones(3)) | {"kl_weight_N": torch.tensor([1e-30, 0.0, 1.0])}
    terms, grad_NV = check_loss(backend, case.but(**{where: broken}, **weights), most=3)
    for name in ("kl_N", "teacher_mass_N", "student_mass_N"):
        assert getattr(terms, name).isnan().tolist() == [True, True, False]
    assert grad_NV.isnan().all(1).tolist() == grad_NV.isnan().any(1).tolist() == [True, False, False]
    assert bool(terms.entropy_N.isfinite().all())


def entry(case: LossCase, name: str, value: Tensor | float, row: int = 1) -> Tensor:
    """Return the column with the first entry of the row replaced."""
    column = getattr(case.tokens, name).clone()
    column[row].view(-1)[:1] = value
    return column


@each_backend
@pytest.mark.parametrize("payload", [0x7FFFFFFF, -1], ids=hex)
@pytest.mark.parametrize("dtype", HALF)
def test_a_nan_of_any_payload_reaches_the_whole_row(dtype: str, payload: int, backend: str) -> None:
    """Rounding a NaN with all bits set to bf16 would carry out of the exponent."""
    backends.leave_to_a_gpu(backend, dtype != "bf16" or backend == "triton split")  # it serves fp32 rows
    nan = torch.tensor(payload, dtype=torch.int32).view(torch.float32)
    names = ["adv_N", "pg_weight_N", "old_logp_N", "kl_weight_N", "reverse_adv_N", "reverse_weight_N"]
    for entropy, two in ((False, False), (True, True)):
        temperatures = (0.7, 1.0 if two else 0.7)
        case = loss_case((3, 2500, 2, 6), dtype, "given", True, entropy, temperatures, reverse="ppo")
        case = case.but(**dict.fromkeys((*WEIGHTS, "reverse_weight_N"), torch.ones(3)))
        columns = [*names, "target_logps_NS", *(["ent_weight_N"] if entropy else [])]
        for name in columns[:: 4 if backends.interpreted(backend) else 1]:
            _, grad_NV = run_loss(backend, case.but(**{name: entry(case, name, nan, 0)}))
            assert bool(grad_NV[0].isnan().all()), name
            assert bool(grad_NV[1:].isfinite().all()), name
