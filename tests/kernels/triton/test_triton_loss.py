"""The Triton row kernel against the reference in float64: every term, every gradient, hostile rows.

On a GPU natively, with larger shapes under -m gpu; elsewhere in Triton's interpreter, which truncates where
it stores bf16 (one ulp of the rule is used up by that).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from smopd import ops
from smopd.kernels.reference import topk as reference
from smopd.kernels.triton import loss as triton_loss
from smopd.kernels.types import (
    CLIP_DUAL,
    CLIP_HIGH,
    CLIP_LOG_RATIO,
    CLIP_LOW,
    CLIP_REVERSE_HIGH,
    CLIP_REVERSE_LOW,
    Candidates,
    KlOptions,
    LossTokens,
    SparseTarget,
    TokenTerms,
)
from tests.kernels import cases
from tests.kernels.offline.offline_launches import pairwise
from tests.kernels.triton.triton_cases import (
    DEVICE,
    DTYPES,
    TERM_RELATIVE,
    TERM_TOLERANCE,
    Case,
    check_gradient,
    check_terms,
    compare_anything,
    kl_size,
    make,
    poisoned,
    run,
    stream,
    truth,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
    pytest.mark.usefixtures("poisoned_memory"),
]
CASES = [
    *cases.INTERPRETED,
    *(
        pytest.param(case, marks=pytest.mark.gpu)
        for case in (
            *(case for case in cases.SMALL if case not in cases.INTERPRETED),
            *cases.FULL,
            *(cases.Case(64, 152_064, 2, 16, dtype) for dtype in cases.DTYPES),
        )
    ),
]
FACTORS: dict[str, Any] = {
    "shape": ("5x1271", "1x7", "2x5000"),
    "dtype": ("bf16", "fp16", "fp32"),
    "target": ("none", "sparse", "repeats", "pooled", "merged", "mixture first"),
    "tail": (False, True),
    "entropy": (False, True),
    "temperatures": ((1.0, 1.0), (0.7, 0.7), (0.7, 1.3)),
    "dual": (False, True),
    "reverse": (None, "paper", "ppo"),
    "old": (False, True),
    "gradient": ("own", "in place", "none"),
    "rows": ("dense", "aligned", "odd"),
    "blocks": ("as shipped", "streamed"),
    "ids": (torch.int32, torch.int64),
}
PAIRS = pairwise(FACTORS)


def label(row: dict[str, Any]) -> str:
    words = (f"{name}:{value}" if isinstance(value, bool) else str(value) for name, value in row.items())
    return "-".join(words)


@pytest.fixture(autouse=True)
def _all_pairs_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter pays for each operation: only a test that is about it compares slots in parts."""
    if not triton_loss._NATIVE:
        monkeypatch.setattr(triton_loss, "_PAIRS", 1 << 20)


@pytest.mark.parametrize("row", PAIRS, ids=label)
def test_terms_and_gradient(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if row["blocks"] == "streamed":
        stream(monkeypatch)
    case = make(**row)
    want, want_grad, size = truth(case)
    got, grad = run(case, row["gradient"])
    check_terms(got, want)
    if grad is not None:
        check_gradient(grad, want_grad, size)


@pytest.mark.parametrize("tail", [False, True], ids=["paper", "tail"])
@pytest.mark.parametrize("shared", CASES, ids=str)
def test_shared_cases(shared: cases.Case, tail: bool) -> None:
    options = {"kappa": shared.kappa, "n_teachers": shared.M, "tail": tail, "entropy": True}
    shape = f"{shared.N}x{shared.V}"
    case = make(shape, shared.dtype, target="merged" if tail else "pooled", **options)
    want, want_grad, size = truth(case)
    terms, grad = run(case, "in place")
    check_terms(terms, want)
    check_gradient(grad, want_grad, size)
    own_terms, own_grad = run(case, "own")
    assert torch.equal(grad, own_grad)
    no_grad_terms, _ = run(case, "none")
    for field in fields(TokenTerms):
        assert torch.equal(getattr(terms, field.name), getattr(own_terms, field.name))
        assert torch.equal(getattr(terms, field.name), getattr(no_grad_terms, field.name))


def test_a_whole_vocabulary_as_shipped() -> None:
    case = make("4x151936", "bf16", target="merged", tail=True)
    want, want_grad, size = truth(case)
    terms, grad = run(case, "in place")
    check_terms(terms, want)
    check_gradient(grad, want_grad, size)


@pytest.mark.parametrize("kappa", [0, 1, 3, 64, 128])
@pytest.mark.parametrize("target", ["sparse", "repeats", "pooled", "merged"])
def test_kappa(target: str, kappa: int) -> None:
    case = make("2x1271", "fp32", target=target, kappa=kappa, tail=True)
    want, want_grad, size = truth(case)
    terms, grad = run(case)
    check_terms(terms, want)
    check_gradient(grad, want_grad, size)


@pytest.mark.parametrize("target", ["repeats", "pooled", "merged"])
def test_slots_compared_in_parts(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make("2x1271", "fp32", target=target, tail=True)
    whole, whole_grad = run(case)
    monkeypatch.setattr(triton_loss, "_PAIRS", 1)
    terms, grad = run(case)
    torch.testing.assert_close(grad, whole_grad, rtol=1e-6, atol=1e-9)
    for name in ("kl_N", "teacher_mass_N", "student_mass_N"):
        torch.testing.assert_close(getattr(terms, name), getattr(whole, name), rtol=1e-6, atol=1e-6)


def test_more_blocks_than_an_int32_has_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    stream(monkeypatch)
    case = make("1x15003", "fp32", target="sparse", tail=True)
    ids = torch.arange(16, dtype=torch.int32, device=DEVICE)[None] * 1000 + 2
    case.tokens = replace(case.tokens, target_ids_NS=ids)
    want, want_grad, size = truth(case)
    terms, grad = run(case)
    check_terms(terms, want)
    check_gradient(grad, want_grad, size)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_vocabulary_has_a_configuration(dtype: str) -> None:
    for n_vocab in (
        1,
        7,
        513,
        2048,
        2049,
        8192,
        16_384,
        50_257,
        151_936,
        262_144,
        300_001,
        triton_loss.MAX_VOCAB,
    ):
        for aligned, slots in itertools.product((False, True), (1, 128, 256, triton_loss.MAX_SUPPORT)):
            shape = triton_loss._configuration(n_vocab, DTYPES[dtype], slots, aligned=aligned)
            blocks = -(-n_vocab // (shape.warps * 32 * shape.elements))
            assert blocks <= 64 and shape.held >= 2 and shape.elements <= 16 and slots <= shape.warps * 128


def test_support_that_fills_segments_and_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adjacent ids: a lane leaves out one segment for several of them; and whole blocks have no rest."""
    stream(monkeypatch)
    case = make("2x700", "fp32", target="sparse", kappa=128, tail=True, temperatures=(0.7, 1.0), entropy=True)
    ids = torch.arange(128, dtype=torch.int32, device=DEVICE).repeat(2, 1)
    ids[1] += 512
    case.tokens = replace(case.tokens, target_ids_NS=ids)
    want, want_grad, size = truth(case)
    terms, grad = run(case)
    check_terms(terms, want)
    check_gradient(grad, want_grad, size)


def test_support_of_the_whole_vocabulary() -> None:
    """There is nothing off the support: the tail bucket is empty on the student's side."""
    case = make("2x7", "fp32", target="sparse", kappa=7, tail=True)
    ids = torch.arange(7, dtype=torch.int32, device=DEVICE).repeat(2, 1)
    logps = torch.randn(2, 7, device=DEVICE).log_softmax(-1)
    case.tokens = replace(case.tokens, target_ids_NS=ids, target_logps_NS=logps)
    want, want_grad, size = truth(case)
    terms, grad = run(case)
    check_terms(terms, want)
    check_gradient(grad, want_grad, size)
    short = replace(case.tokens, target_logps_NS=logps - 0.5)
    terms, _ = run(replace(case, tokens=short))
    assert bool((terms.kl_N == math.inf).all())  # teacher mass where the student has none


def test_the_tail_is_not_a_difference() -> None:
    """The student's mass off the support is 1e-12 of the row and still right to fp32's precision."""
    case = make("3x1271", "fp32", target="sparse", tail=True, kappa=16)
    at = torch.arange(16, device=DEVICE, dtype=torch.int32).repeat(3, 1) * 5
    logits = case.logits.clone().scatter_add_(-1, at.long(), torch.full((3, 16), 34.0, device=DEVICE))
    case = Case(logits, replace(case.tokens, target_ids_NS=at), case.settings)
    case.tokens = replace(case.tokens, target_logps_NS=torch.full((3, 16), math.log(0.05), device=DEVICE))
    want, want_grad, size = truth(case)
    terms, grad = run(case)
    assert bool((1.0 - want.student_mass_N < 1e-11).all())
    check_terms(terms, want)
    off, want_off = (g.double().scatter(-1, at.long(), 0.0).abs().sum(-1) for g in (grad, want_grad))
    torch.testing.assert_close(off, want_off, rtol=1e-5, atol=0.0)
    check_gradient(grad, want_grad, size)


@pytest.mark.parametrize("shape", ["5x1271", pytest.param("64x151936", marks=pytest.mark.gpu)])
def test_repeated_runs_and_rows_alone_are_bitwise_equal(shape: str) -> None:
    case = make(shape, "bf16", target="merged", tail=True, entropy=True, temperatures=(0.7, 1.0))
    terms, grad = run(case)
    again, grad_again = run(case)
    assert torch.equal(grad, grad_again) and torch.equal(terms.kl_N, again.kl_N)
    alone = Case(case.logits[2:3], case.tokens.rows(2, 3), case.settings)
    row_terms, row_grad = run(alone)
    assert torch.equal(row_grad[0], grad[2])
    for field in fields(TokenTerms):
        assert torch.equal(getattr(row_terms, field.name)[0], getattr(terms, field.name)[2])


def test_no_rows() -> None:
    case = make("5x1271")
    terms = triton_loss.loss_rows(case.logits[:0], case.tokens.rows(0, 0), case.settings, case.logits[:0])
    assert terms.kl_N.shape == (0,) and terms.clipped_N.dtype == torch.int8


def test_log_alpha_of_every_shape() -> None:
    case = make("3x1271", "fp32", target="pooled", tail=True)
    by_token = torch.tensor([[0.4], [0.5], [0.2]])
    for log_alpha in (torch.tensor([0.3, 0.7]).log(), by_token.log(), torch.zeros(1)):
        tokens = replace(case.tokens, log_alpha=log_alpha.to(DEVICE))
        got, _ = run(replace(case, tokens=tokens), "none")
        check_terms(got, truth(replace(case, tokens=tokens))[0])


def test_a_teacher_that_is_off_adds_nothing() -> None:
    case = make("3x1271", "fp32", target="merged", tail=True)
    log_alpha = torch.tensor([0.0, -math.inf], device=DEVICE)
    got, grad = run(replace(case, tokens=replace(case.tokens, log_alpha=log_alpha)))
    one = replace(
        case.tokens,
        teacher_ids_NMS=case.tokens.teacher_ids_NMS[:, :1],
        teacher_logps_NMS=case.tokens.teacher_logps_NMS[:, :1],
        log_alpha=log_alpha[:1],
    )
    want, want_grad = run(replace(case, tokens=one))
    torch.testing.assert_close(got.kl_N, want.kl_N)
    torch.testing.assert_close(grad, want_grad)


def test_too_large_a_target_is_refused() -> None:
    case = make("2x1271", target="sparse", kappa=triton_loss.MAX_SUPPORT + 1)
    with pytest.raises(ValueError, match="entries, expected at most"):
        run(case)
    assert triton_loss.unserved("loss_rows", case.logits, n_support=triton_loss.MAX_SUPPORT) is None
    assert "expected at most" in triton_loss.unserved("loss_rows", case.logits, n_pooled=2**20)


@pytest.mark.parametrize("surrogate", ["paper", "ppo"])
@pytest.mark.parametrize(
    ("log_ratio", "adv", "bits"),
    [
        (0.0, 1.0, 0),
        (0.5, 1.0, CLIP_HIGH),
        (0.3, -1.0, 0),
        (-0.5, -1.0, CLIP_LOW),
        (1.5, -1.0, CLIP_DUAL),
        (25.0, 1.0, CLIP_HIGH | CLIP_LOG_RATIO),
        (-25.0, 1.0, CLIP_LOG_RATIO),
    ],
)
def test_clip_bits(log_ratio: float, adv: float, bits: int, surrogate: str) -> None:
    case = make("2x1271", "fp32", target="none", dual=True, reverse=surrogate)
    tokens, settings = case.tokens, case.settings
    logq = (case.logits.double() / settings.temperature).log_softmax(-1)
    logp = logq.gather(-1, tokens.token_ids_N.long()[:, None])[:, 0]
    case.tokens = replace(
        tokens,
        adv_N=torch.full((2,), adv, device=DEVICE),
        old_logp_N=(logp - log_ratio).float(),
        reverse_adv_N=torch.tensor([1.0, -1.0], device=DEVICE),
    )
    want, want_grad, size = truth(case)
    terms, grad = run(case)
    assert torch.equal(terms.clipped_N, want.clipped_N)
    reverse_bits = CLIP_REVERSE_LOW | CLIP_REVERSE_HIGH
    assert [int(clipped) & ~reverse_bits for clipped in terms.clipped_N] == [bits, bits]
    check_terms(terms, want)
    check_gradient(grad, want_grad, size)


@pytest.mark.parametrize("blocks", ["as shipped", "streamed"])
@pytest.mark.parametrize("entropy", [False, True], ids=["flat", "entropy"])
@pytest.mark.parametrize("tail", [False, True], ids=["paper", "tail"])
def test_infinities_and_nan(tail: bool, entropy: bool, blocks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if blocks == "streamed":
        stream(monkeypatch)
    case = make("10x1271", "fp32", target="sparse", tail=tail, entropy=entropy)
    logits, tokens = case.logits, case.tokens
    columns = {name: torch.ones(10, device=DEVICE) for name in ("pg_weight_N", "kl_weight_N", "ent_weight_N")}
    logps = tokens.target_logps_NS.clone()
    support = tokens.target_ids_NS.long().where(logps > -math.inf, 0)
    off = torch.ones_like(logits, dtype=torch.bool).scatter_(-1, support, False)
    off.scatter_(-1, tokens.token_ids_N.long()[:, None], False)
    logits[0] = -math.inf
    logits[1, 700] = math.inf
    logits[2, 300] = math.nan
    logits[3].masked_fill_(off[3] & (torch.arange(1271, device=DEVICE) % 2 == 0), -math.inf)
    logits[4].masked_fill_(off[4], -math.inf)  # nothing but support and token
    logits[5, support[5, 2]] = -math.inf  # where the teacher has mass
    logps[6] = -math.inf  # no target at all
    logits[7] *= 1e3
    logits[8].masked_fill_(off[8], torch.finfo(torch.float32).min)
    logits[9, 40:] = -math.inf  # whole blocks
    case.tokens = replace(tokens, target_logps_NS=logps, **columns)
    case.tokens = replace(case.tokens, old_logp_N=None)
    compare_anything(case)


@pytest.mark.parametrize(
    ("target", "where", "tail"),
    [
        ("repeats", "target_logps_NS", True),
        ("repeats", "target_logps_NS", False),
        ("pooled", "teacher_logps_NMS", False),
        ("merged", "teacher_logps_NMS", True),
        ("mixture first", "teacher_logps_NMS", True),
        ("pooled", "log_alpha", True),
        ("merged", "log_alpha", False),
    ],
)
def test_a_nan_of_the_teachers_is_not_lost(target: str, where: str, tail: bool) -> None:
    """It is in the row's KL, masses and gradient, as in the reference, and in nothing else."""
    case = make("2x1271", "fp32", target=target, tail=tail, entropy=True)
    broken = getattr(case.tokens, where).clone()
    broken[0, ..., 1] = math.nan
    case.tokens = replace(case.tokens, **{where: broken})
    compare_anything(case)
    terms, grad = run(case)
    for name in ("kl_N", "teacher_mass_N", "student_mass_N"):
        assert getattr(terms, name).isnan().tolist() == [True, False]
    assert bool(grad[0].isnan().all()) and bool(terms.entropy_N.isfinite().all())


@pytest.mark.parametrize("weight", [0.0, 1.0], ids=["weight 0", "coef 0"])
@pytest.mark.parametrize("two", [False, True], ids=["one T", "two T"])
@pytest.mark.parametrize("tail", [False, True], ids=["paper", "tail"])
def test_a_nan_of_teachers_that_are_only_watched_stays_in_the_statistics(
    tail: bool, two: bool, weight: float
) -> None:
    case = make(
        "2x1271", "fp32", target="pooled", tail=tail, entropy=True, temperatures=(1.0, 0.7 if two else 1.0)
    )
    broken = case.tokens.teacher_logps_NMS.clone()
    broken[0, 0, 1] = math.nan
    weight_N = torch.full((2,), weight, device=DEVICE)
    case.settings = replace(case.settings, opd_coef=1.0 - weight)
    case.tokens = replace(case.tokens, kl_weight_N=weight_N)
    want_grad = run(case)[1]
    case.tokens = replace(case.tokens, teacher_logps_NMS=broken)
    compare_anything(case)
    terms, grad = run(case)
    assert terms.kl_N.isnan().tolist() == [True, False]
    torch.testing.assert_close(grad, want_grad, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_tokens_that_count_nowhere_are_zero_whatever_their_logits(bad: float) -> None:
    case = make("4x1271", "bf16", target="merged", tail=True, entropy=True)
    zero = torch.zeros(4, device=DEVICE)
    idle = torch.tensor([False, True, False, True], device=DEVICE)
    columns = {
        name: torch.where(idle, zero, 0.5 + getattr(case.tokens, name).abs())
        for name in ("pg_weight_N", "kl_weight_N", "ent_weight_N")
    }
    case.tokens = replace(case.tokens, **columns)
    want, want_grad = run(case)
    case.logits[idle] = bad
    terms, grad = run(case)
    assert torch.equal(grad, want_grad) and not bool(grad[idle].any())
    for field in fields(TokenTerms):
        column = getattr(terms, field.name)
        assert torch.equal(column, getattr(want, field.name)) and not bool(column[idle].any())


def test_tokens_that_only_are_observed_have_terms_and_no_gradient() -> None:
    """kl_weight 1 with opd_coef 0: statistics, and exactly no gradient even where a logit is NaN."""
    case = make("2x1271", "bf16", target="merged", tail=True)
    zero, one = torch.zeros(2, device=DEVICE), torch.ones(2, device=DEVICE)
    case.tokens = replace(case.tokens, pg_weight_N=zero, kl_weight_N=one, ent_weight_N=one)
    case = replace(case, settings=replace(case.settings, opd_coef=0.0))
    case.logits[1, 5] = math.nan
    want, want_grad, _ = truth(case)
    terms, grad = run(case)
    check_terms(terms, want)
    assert not bool(grad.any()) and not bool(want_grad.any()) and bool(terms.kl_N[1].isnan())


@pytest.mark.parametrize("upstream", ["both", "logp", "kl"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", ["repeats", "pooled", "merged"])
@pytest.mark.parametrize("tail", [False, True], ids=["paper", "tail"])
def test_forward_kl(tail: bool, target: str, dtype: str, upstream: str) -> None:
    check_forward_kl(make("3x1271", dtype, target=target, tail=tail), dtype, target, tail, upstream)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_kl_of_every_shape(case: cases.Case) -> None:
    shape, sizes = f"{case.N}x{case.V}", {"kappa": case.kappa, "n_teachers": case.M}
    check_forward_kl(make(shape, case.dtype, target="merged", **sizes), case.dtype, "merged", True, "both")


def check_forward_kl(case: Case, dtype: str, target: str, tail: bool, upstream: str) -> None:
    tokens = case.tokens
    if target == "repeats":
        given: Any = SparseTarget(tokens.target_ids_NS, tokens.target_logps_NS)
    else:
        teachers = (tokens.teacher_ids_NMS, tokens.teacher_logps_NMS, tokens.log_alpha)
        given = Candidates(*teachers, case.settings.kappa, target == "merged")
    arguments = (tokens.token_ids_N, given, KlOptions(tail=tail, temperature=0.8))
    wide = case.logits.double()
    for got, want in zip(
        triton_loss.forward_kl_rows(case.logits, *arguments),
        reference.forward_kl_rows(wide, *arguments),
        strict=True,
    ):
        torch.testing.assert_close(got.double(), want, rtol=TERM_RELATIVE, atol=TERM_TOLERANCE)
    dlogp = (
        None if upstream == "kl" else torch.randn(len(tokens.token_ids_N), device=DEVICE).to(DTYPES[dtype])
    )
    dkl = None if upstream == "logp" else torch.randn(len(tokens.token_ids_N), device=DEVICE)
    got = triton_loss.forward_kl_gradient(case.logits, *arguments, dlogp_N=dlogp, dkl_N=dkl)
    wide_upstream = {
        "dlogp_N": None if dlogp is None else dlogp.double(),
        "dkl_N": None if dkl is None else dkl.double(),
    }
    want = reference.forward_kl_gradient(wide, *arguments, **wide_upstream)
    size = torch.zeros_like(wide)
    if dkl is not None:
        size += kl_size(wide, given, dkl, tail, 0.8)
    if dlogp is not None:
        size += dlogp.double().abs()[:, None] / 0.8
    check_gradient(got, want, size)


@pytest.mark.gpu
def test_a_cuda_graph_replays_the_loss() -> None:
    case = make("64x151936", "bf16", target="merged", tail=True, entropy=True)
    grad = torch.empty_like(case.logits)
    triton_loss.loss_rows(case.logits, case.tokens, case.settings, grad)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        terms = triton_loss.loss_rows(case.logits, case.tokens, case.settings, grad)
    case.logits.copy_(torch.randn_like(case.logits))
    graph.replay()
    want = poisoned(case.logits)
    want_terms = triton_loss.loss_rows(case.logits, case.tokens, case.settings, want)
    assert torch.equal(grad, want) and torch.equal(terms.kl_N, want_terms.kl_N)


@pytest.mark.gpu
@pytest.mark.xdist_group("large memory")
def test_rows_beyond_32_bit_offsets() -> None:
    n_rows = 16_384
    small = make("4x151936", "bf16", target="merged", tail=True)
    logits = small.logits.repeat(n_rows // 4, 1)
    columns = {
        field.name: getattr(small.tokens, field.name).repeat(
            n_rows // 4, *[1] * (getattr(small.tokens, field.name).dim() - 1)
        )
        for field in fields(LossTokens)
        if getattr(small.tokens, field.name) is not None
    }
    want, want_grad = run(small)
    terms = triton_loss.loss_rows(logits, LossTokens(**columns), small.settings, logits)
    assert torch.equal(logits[-4:], want_grad) and torch.equal(terms.kl_N[-4:], want.kl_N)


GRAPHED = ("topk_forward_kl", "teacher_forward_kl", "linear_topk_logprobs", "linear_smopd_loss", "recompute")


@pytest.mark.gpu
@pytest.mark.parametrize("name", GRAPHED)
def test_a_cuda_graph_replays_forward_and_backward(name: str) -> None:
    """Through the public functions: captured once, replayed on other numbers, the bits of an eager call."""
    case = make("64x151936", "bf16", target="sparse" if name == "topk_forward_kl" else "merged", tail=True)
    tokens, token_ids = case.tokens, case.tokens.token_ids_N
    torch.manual_seed(1)
    hidden = torch.randn(64, 128, device=DEVICE).bfloat16().requires_grad_()
    weight = (0.1 * torch.randn(151936, 128, device=DEVICE)).bfloat16().requires_grad_()
    logits = case.logits.clone().requires_grad_()
    leaves = [logits] if "forward_kl" in name else [hidden, weight]

    def call() -> list[Tensor]:
        if name == "topk_forward_kl":
            target = (tokens.target_ids_NS, tokens.target_logps_NS)
            outputs = ops.topk_forward_kl(logits, token_ids, *target, tail=True)
        elif name == "teacher_forward_kl":
            target = (tokens.teacher_ids_NMS, tokens.teacher_logps_NMS, tokens.log_alpha)
            outputs = ops.teacher_forward_kl(logits, token_ids, *target, 16, merge=True, tail=True)
        elif name == "linear_topk_logprobs":
            top = ops.linear_topk_logprobs(hidden, weight, 16, token_ids_N=token_ids)
            return [top.ids_NS, top.logps_NS, top.token_logp_N]
        else:
            options = {"recompute": name == "recompute"}
            loss, stats = ops.linear_smopd_loss(hidden, weight, tokens, case.settings, **options)
            outputs = (loss, stats.kl_N)
        total = sum(output.sum() for output in outputs if output.requires_grad)
        return [*(output.detach() for output in outputs), *torch.autograd.grad(total, leaves)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call()
    with torch.no_grad():
        for leaf in leaves:
            leaf.copy_(torch.randn_like(leaf) * 0.1)
    graph.replay()
    for replayed, eager in zip(got, call(), strict=True):
        assert torch.equal(replayed, eager)
