"""loss_rows on every backend: terms and gradient against float64, for all options, shapes and layouts."""

import math
from dataclasses import replace

import pytest
import torch

from smopd import ops
from smopd.kernels.reference import topk as reference
from smopd.kernels.types import LossSettings, LossTokens, SparseTarget
from tests.kernels import backends, cases
from tests.kernels.cases import LossCase, check_loss, loss_case, run_loss
from tests.kernels.float64 import TERMS
from tests.kernels.pairwise import label, pairwise

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
each_backend = backends.each("loss_rows")
but_split = backends.each("loss_rows", but=("triton split",))
"""Where the split kernel does not serve: two temperatures, rows of odd strides, or it serves anyway."""
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
def test_equals_float64(
    row: dict, backend: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if row["streamed"] and backend == "triton":
        request.getfixturevalue("streamed")
    if row["streamed"]:  # the reference computes a few rows at a time
        monkeypatch.setattr(reference, "ROW_CHUNK_BYTES_CPU", 3 * 8 * row["shape"][1])
    case = loss_case(**{name: value for name, value in row.items() if name not in OF_THE_RUN})
    check_loss(backend, case, row["gradient"], row["layout"])


@but_split
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("target", "tail"), [("merged", True), ("pooled", False)])
def test_a_whole_vocabulary(target: str, tail: bool, dtype: str, backend: str) -> None:
    backends.leave_to_a_gpu(backend, (dtype == "fp32") == tail)
    two = (1.0, 1.0) if tail else (1.0, 0.7)
    case = loss_case((3, 151_936, 2, 16), dtype, target, tail, temperatures=two, entropy=tail)
    check_loss(backend, case, "in place", most=1)


@but_split
@pytest.mark.parametrize("target", ["given", "repeats", "pooled", "merged"])
def test_any_kappa(target: str, backend: str) -> None:
    few = (0, 200) if target == "given" else (3, 70)
    for kappa in few if backends.interpreted(backend) else (0, 1, 3, 64, 128, 200):
        check_loss(backend, loss_case((2, 1271, 2, kappa), target=target), most=1)


SUPPORTS = {
    "adjacent": torch.stack([torch.arange(128), torch.arange(2600 - 128, 2600)]),
    "ends of blocks": torch.arange(16).repeat(2, 1) * 128 + 127,
    "far apart": torch.arange(16).repeat(2, 1) * 170 + 2,
}


@but_split
@pytest.mark.parametrize("place", SUPPORTS)
def test_support_anywhere(place: str, backend: str, request: pytest.FixtureRequest) -> None:
    if backend == "triton":
        request.getfixturevalue("streamed")
    ids_NS = SUPPORTS[place]
    logps_NS = cases.random_logits(*ids_NS.shape, seed=4).log_softmax(-1) - 0.2
    case = loss_case((2, 2600, 1, 3), target="given", temperatures=(0.7, 1.0), entropy=True)
    tokens = replace(case.tokens, target_ids_NS=ids_NS, target_logps_NS=logps_NS)
    check_loss(backend, LossCase(case.logits_NV, tokens, case.settings))


@each_backend
def test_a_small_tail_keeps_its_digits(backend: str) -> None:
    """The student's mass off the support is 1e-12, which 1 - sum would round to 0."""
    logits_NV = torch.full((2, 300), -30.0)
    logits_NV[:, :4] = torch.tensor([3.0, 2.0, 1.0, 0.0])
    if not backends.interpreted(backend):  # it has no fused multiply-add
        logits_NV[1] += 1000.0
    logps_NS = logits_NV[:, :4].double().log_softmax(-1).sub(1e-3).float()
    given = SparseTarget(torch.arange(4).expand(2, 4), logps_NS)
    tokens = replace(
        cases.random_tokens(logits_NV, given, old=False, reverse=False),
        kl_weight_N=torch.ones(2),
        pg_weight_N=torch.zeros(2),
    )
    for tail in (True,) if backend.startswith("triton") else (True, False):  # its bound is larger
        case = LossCase(logits_NV, tokens, LossSettings(tail=tail))
        assert bool((1.0 - case.truth.terms.student_mass_N < 1e-11).all())
        _, grad_NV = check_loss(backend, case)
        assert grad_NV is not None
        torch.testing.assert_close(grad_NV[:, 4:].double(), case.truth.grad_NV[:, 4:], rtol=1e-5, atol=0.0)


FAR = math.exp(25.0)
CLIPS = {  # advantage, ratio, value, bits; with bits or without an advantage the gradient is 0
    "surrogate": [
        (2.0, 1.0, -2.0, 0),
        (2.0, 1.5, -2.4, ops.CLIP_HIGH),
        (2.0, 0.5, -1.0, 0),
        (-2.0, 0.5, 1.6, ops.CLIP_LOW),
        (-2.0, 9.0, 18.0, 0),
        (-2.0, FAR, 2.0 * math.exp(20.0), ops.CLIP_LOG_RATIO),
        (2.0, FAR, -2.4, ops.CLIP_HIGH | ops.CLIP_LOG_RATIO),
        (2.0, 1 / FAR, -2.0 * math.exp(-20.0), ops.CLIP_LOG_RATIO),
    ],
    "dual clip": [(2.0, 9.0, -2.4, ops.CLIP_HIGH), (-2.0, 9.0, 6.0, ops.CLIP_DUAL), (0.0, 9.0, 0.0, 0)],
    "paper": [
        (2.0, 1.0, -2.0, 0),
        (2.0, 0.5, -1.6, ops.CLIP_REVERSE_LOW),
        (-2.0, 1.5, 2.4, ops.CLIP_REVERSE_HIGH),
        (2.0, 1.5, -2.4, ops.CLIP_REVERSE_HIGH),
    ],
    "ppo": [
        (2.0, 0.5, -1.0, 0),
        (-2.0, 1.5, 3.0, 0),
        (2.0, 1.5, -2.4, ops.CLIP_REVERSE_HIGH),
        (-2.0, 0.5, 1.6, ops.CLIP_REVERSE_LOW),
    ],
}


@each_backend
@pytest.mark.parametrize("kind", CLIPS)
def test_each_case_of_the_clip(kind: str, backend: str) -> None:
    adv_N, ratio_N, value_N, bits_N = torch.tensor(CLIPS[kind], dtype=torch.float64).T
    logits_NV, reverse = cases.random_logits(len(adv_N), 5), kind in ("paper", "ppo")
    logp_N = logits_NV.double().log_softmax(-1)[:, 2]
    tokens = LossTokens(
        token_ids_N=torch.full((len(adv_N),), 2),
        adv_N=(0.0 * adv_N if reverse else adv_N).float(),
        pg_weight_N=torch.full((len(adv_N),), 1.0 - reverse),
        old_logp_N=(logp_N - ratio_N.log()).float(),  # rounded to float32
        reverse_adv_N=adv_N.float() if reverse else None,
        reverse_weight_N=torch.ones(len(adv_N)) if reverse else None,
    )
    options = {"dual clip": {"dual_clip": 3.0}, "ppo": {"reverse_kl_surrogate": "ppo"}}.get(kind, {})
    case = LossCase(logits_NV, tokens, LossSettings(**options))
    terms, grad_NV = check_loss(backend, case, most=len(adv_N))
    found_N = terms.reverse_N if reverse else terms.surrogate_N
    torch.testing.assert_close(found_N, value_N.float(), rtol=1e-5, atol=1e-6)
    assert terms.clipped_N.tolist() == bits_N.tolist()
    assert (~grad_NV.any(1)).equal((bits_N != 0) | (adv_N == 0))


@but_split
@pytest.mark.parametrize("dtype", cases.HALF)
def test_bits_do_not_depend_on_the_gradient_buffer_or_other_rows(dtype: str, backend: str) -> None:
    backends.leave_to_a_gpu(backend, dtype != "bf16")
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


@backends.each("loss_rows", but=("reference", "triton", "triton split"))
@pytest.mark.parametrize("n_vocab", [265, 70_000], ids="V{}".format)
def test_bits_do_not_depend_on_threads(n_vocab: int, backend: str, each_number_of_threads) -> None:
    few = loss_case((5, n_vocab, 2, 16), "bf16", entropy=True)
    case = few.at(torch.arange(5).repeat(8))
    results = each_number_of_threads(lambda: run_loss(backend, case))
    assert all(backends.same(result, results[0]) for result in results)
    assert torch.equal(results[0][1].view(8, 5, -1), results[0][1][:5].expand(8, -1, -1))


@but_split
def test_columns_of_any_stride_and_type(backend: str) -> None:
    case = loss_case((3, 233, 2, 8), target="given")
    tokens = case.tokens
    other = case.but(
        target_ids_NS=tokens.target_ids_NS.repeat_interleave(2, 1)[:, ::2],
        target_logps_NS=tokens.target_logps_NS.T.contiguous().T,
        pg_weight_N=tokens.pg_weight_N[:, None].repeat(1, 3)[:, 1],
        adv_N=tokens.adv_N.double(),
        token_ids_N=tokens.token_ids_N.repeat_interleave(2)[::2].int(),
    )
    assert backends.same(run_loss(backend, case), run_loss(backend, other))


@but_split
@pytest.mark.parametrize("target", ["none", "given", "merged"])
def test_no_rows(target: str, backend: str) -> None:
    case = loss_case((3, 40, 2, 4), target=target).at(torch.zeros(0, dtype=torch.int64))
    terms, grad_NV = run_loss(backend, case)
    assert grad_NV is not None and grad_NV.shape == (0, 40)
    assert all(getattr(terms, name).shape == (0,) for name in TERMS)


@backends.each("scale_")
@pytest.mark.parametrize("dloss", [1.0, 0.3])
def test_a_gradient_is_scaled_into_another_dtype(dloss: float, backend: str) -> None:
    backends.need(backend)
    at = backends.device(backend)
    grad = torch.randn(50, 9, generator=torch.Generator().manual_seed(0)).to(at)
    before, out = grad.clone(), torch.empty_like(grad, dtype=torch.float16)
    backends.function(backend, "scale_")(grad, torch.tensor(dloss, device=at), out)
    assert torch.equal(out, (before * dloss).half()) and torch.equal(grad, before)
