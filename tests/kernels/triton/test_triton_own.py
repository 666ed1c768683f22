"""Triton only: launch shapes, limits, far memory, the split kernel, CUDA graphs. Values: conformance/."""

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace

import pytest
import torch
from torch import Tensor

from tests.kernels import backends, cases

pytest.importorskip("triton", reason="Triton is not installed")

# isort: split
from smopd import ops
from smopd.kernels.reference import topk as reference
from smopd.kernels.triton import advantages as triton_advantages
from smopd.kernels.triton import loss as triton_loss
from smopd.kernels.triton import mixture as triton_mixture
from smopd.kernels.triton import topk as triton_topk
from smopd.kernels.types import LossSettings, TokenTerms
from tests.kernels.cases import LossCase, check_loss, loss_case, run_loss
from tests.kernels.triton.test_triton_large import Size, make

DEVICE, INF = backends.device("triton"), math.inf
gpu = pytest.mark.gpu
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # from numpy in the interpreter


def test_more_blocks_than_an_int32_has_bits(streamed: None) -> None:
    case = loss_case((1, 17003, 1, 3), target="given")
    ids_NS = torch.arange(16, dtype=torch.int32)[None] * 1000 + 2
    logps_NS = torch.randn(1, 16, generator=torch.manual_seed(0)).log_softmax(-1) - 0.1
    tokens = replace(case.tokens, target_ids_NS=ids_NS, target_logps_NS=logps_NS)
    check_loss("triton", LossCase(case.logits_NV, tokens, case.settings))


def test_the_last_chunk_of_the_widest_vocabulary() -> None:
    """Its index fills the 16 bits of the key. Ties would be slow in the interpreter."""
    logits_NV = cases.random_logits(1, triton_topk.MAX_VOCAB, "bf16")
    logits_NV[0, -3:] = torch.tensor([30.0, 40.0, 35.0])
    got, true = backends.call("triton", "topk_logprobs", logits_NV, 5), reference.topk_logprobs(logits_NV, 5)
    assert torch.equal(got.ids_NS, true.ids_NS)
    torch.testing.assert_close(got.logps_NS, true.logps_NS, rtol=1e-6, atol=2e-5)


@pytest.mark.parametrize("merge", [True, False], ids=["merged", "pooled"])
def test_teachers_further_apart_than_32_bits_reach(merge: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":  # the interpreter would copy the whole storage
        monkeypatch.setattr("triton.runtime.interpreter.GridExecutor._restore_args_dev", lambda *_: None)
    ids, logps, log_alpha = cases.random_teachers(3, 40, 4, 3)
    far = 2**30 + 8  # elements between teachers; most of the memory is never touched
    torch.utils.deterministic.fill_uninitialized_memory = False

    def far_apart(values: Tensor) -> Tensor:
        return values.to(DEVICE).new_empty(3 * far).as_strided(values.shape, (4, far, 1)).copy_(values)

    try:
        far_ids, far_logps = far_apart(ids.clamp(0, 39).to(torch.int8)), far_apart(logps.half())
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True
    got = triton_mixture.teacher_mixture(far_ids, far_logps, log_alpha.to(DEVICE), 6, merge=merge)
    near = (far_ids.contiguous(), far_logps.contiguous(), log_alpha.to(DEVICE))
    assert backends.same(got, triton_mixture.teacher_mixture(*near, 6, merge=merge))


@pytest.mark.parametrize("bad", [-1, 300, 2**32 + 5])
@pytest.mark.parametrize("target", ["token", "given", "pooled", "merged"])
def test_an_id_outside_the_vocabulary_makes_its_row_nan(target: str, bad: int) -> None:
    """Ids are not checked on a GPU. Nothing is read or written out of bounds."""
    backends.leave_to_a_gpu("triton", target in ("given", "pooled") and bad < 2**32)
    case = loss_case((3, 300, 2, 8), target="given" if target == "token" else target)
    name = {"token": "token_ids_N", "given": "target_ids_NS"}.get(target, "teacher_ids_NMS")
    columns = {name: getattr(case.tokens, name).long().clone()}
    for live in ("target_logps_NS", "teacher_logps_NMS"):
        if target != "token" and getattr(case.tokens, live) is not None:
            columns[live] = getattr(case.tokens, live).clone()
            columns[live][1].view(-1)[-1:] = -0.5  # a slot that is neither empty nor cut
    (fine, fine_NV), others = run_loss("triton", case.but(**columns)), torch.tensor([0, 2])
    columns[name][1].view(-1)[-1:] = bad
    terms, grad_NV = run_loss("triton", case.but(**columns))
    assert torch.equal(grad_NV[others], fine_NV[others]) and not bool(fine_NV.isnan().any())
    assert bool(grad_NV[1].isnan().all())
    for term in ("logp_N", "kl_N"):
        assert torch.equal(getattr(terms, term)[others], getattr(fine, term)[others])
    assert (terms.logp_N if target == "token" else terms.kl_N)[1].isnan()
    if target == "token":
        options = {"token_ids_N": columns[name]}
        got = backends.call("triton", "topk_logprobs", case.logits_NV, 4, **options)
        assert got.token_logp_N.isnan().tolist() == [False, True, False]


def test_a_token_of_minus_100_does_not_change_a_forward_kl() -> None:
    case = loss_case((2, 300, 2, 8), target="given", reverse=None, old=False)
    kl_alone = {"pg_weight_N": torch.zeros(2), "kl_weight_N": torch.tensor([0.4, -0.9])}
    cases = (case.but(token_ids_N=torch.tensor(ids), **kl_alone) for ids in ([5, -100], [5, 7]))
    results = (run_loss("triton", each) for each in cases)
    (terms, grad_NV), (want, want_NV) = results
    assert torch.equal(terms.kl_N, want.kl_N) and torch.equal(grad_NV, want_NV)


@pytest.mark.parametrize(
    ("module", "op", "shape", "facts", "expected"),
    [
        (triton_topk, "topk_logprobs", (2, 200), {"kappa": 128}, None),
        (triton_topk, "topk_logprobs", (2, 200), {"kappa": 129}, "kappa is 129"),
        (triton_topk, "topk_logprobs", (1, 2**19 + 1), {"kappa": 1}, "V is 524289"),
        (triton_mixture, "teacher_mixture", (2, 200), {"n_pooled": 1024}, None),
        (triton_mixture, "teacher_mixture", (2, 200), {"n_pooled": 1025}, "expected at most 1024"),
        (triton_loss, "loss_rows", (2, 200), {"n_support": triton_loss.MAX_SUPPORT}, None),
        (triton_loss, "loss_rows", (2, 200), {"n_support": triton_loss.MAX_SUPPORT + 1}, "expected at most"),
        (triton_loss, "loss_rows", (1, 2**19 + 1), {}, "V is 524289"),
        (triton_advantages, "grpo_advantages", (2, 32), {}, None),
        (triton_advantages, "grpo_advantages", (2, 33), {}, "K is 33"),
    ],
)
def test_limits(module, op: str, shape: tuple, facts: dict, expected: str | None) -> None:
    why_not = module.unserved(op, torch.empty(shape, device="meta"), **facts)
    assert why_not is None if expected is None else expected in str(why_not)


def test_alignment_is_that_of_the_address() -> None:
    """Memory of another library has offset 0 at any address."""
    lent = torch.from_dlpack(torch.zeros(65, dtype=torch.bfloat16)[1:])
    rows = lent.view(8, 8)
    assert rows.storage_offset() == 0 and rows.data_ptr() % 16 == 2
    assert triton_loss._aligned_elements(rows) == 1
    assert triton_loss._aligned_elements(rows.clone()) == 8


GRAPHED = (
    *("topk_logprobs", "teacher_mixture", "gdpo_advantages", "smopd_loss", "topk_forward_kl"),
    *("linear_topk_logprobs", "linear_smopd_loss"),
)


@gpu
@pytest.mark.parametrize("name", GRAPHED)
def test_a_cuda_graph_replays_forward_and_backward(name: str) -> None:
    """Replays on other numbers have the bits of an eager call."""
    given, pooled = (
        backends.moved(loss_case((64, 151_936, 2, 16), "bf16", target, ids=torch.int32), "cuda")
        for target in ("given", "merged")
    )
    tokens, settings, token_ids = pooled.tokens, pooled.settings, pooled.tokens.token_ids_N
    teachers = (tokens.teacher_ids_NMS, tokens.teacher_logps_NMS, tokens.log_alpha)
    target = (given.tokens.target_ids_NS, given.tokens.target_logps_NS)
    torch.manual_seed(1)
    hidden = torch.randn(64, 128, device=DEVICE).bfloat16().requires_grad_()
    weight = (0.1 * torch.randn(151936, 128, device=DEVICE)).bfloat16().requires_grad_()
    logits = pooled.logits_NV.clone().requires_grad_()
    rewards, group = torch.randn(500, 4, device=DEVICE), torch.arange(500, device=DEVICE) // 8
    leaves = [hidden, weight] if "linear" in name else [logits]
    calls = {
        "topk_logprobs": lambda: ops.topk_logprobs(logits, 16, token_ids_N=token_ids),
        "linear_topk_logprobs": lambda: ops.linear_topk_logprobs(hidden, weight, 16, token_ids_N=token_ids),
        "teacher_mixture": lambda: ops.teacher_mixture(*teachers, 16, merge=True),
        "gdpo_advantages": lambda: (ops.gdpo_advantages(rewards, group),),
        "topk_forward_kl": lambda: ops.topk_forward_kl(logits, token_ids, *target, tail=True),
        "smopd_loss": lambda: ops.smopd_loss(logits, tokens, settings),
        "linear_smopd_loss": lambda: ops.linear_smopd_loss(hidden, weight, tokens, settings),
    }

    def call() -> list[Tensor]:
        outputs = calls[name]()
        if is_dataclass(outputs):
            outputs = [getattr(outputs, field.name) for field in fields(outputs)]
        outputs = [outputs[0], outputs[1].kl_N] if name.endswith("smopd_loss") else outputs
        roots = [output.sum() for output in outputs if output.requires_grad]
        grads = torch.autograd.grad(sum(roots), leaves) if roots else ()
        return [*(output.detach() for output in outputs), *grads]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call()
    with torch.no_grad():
        for leaf in [*leaves, rewards]:
            leaf.copy_(torch.randn_like(leaf) * 0.1)
    graph.replay()
    for replayed, eager in zip(got, call(), strict=True):
        assert torch.equal(replayed, eager)


SETTINGS = {
    "paper": LossSettings(merge=False, tail=False),
    "tail": LossSettings(),
    "entropy": LossSettings(entropy_coef=0.1),
}
WEIGHTS = ("pg_weight_N", "kl_weight_N", "ent_weight_N")
SIZES = ((2048, 151_936), (33, 32_000), (1, 262_144), (12_000, 50_304))


@pytest.mark.parametrize("consecutive", [4, 8])
def test_parts_are_a_row(consecutive: int) -> None:
    """Each part fits the registers in whole vectors, and its whole blocks are full."""
    block = triton_loss._SPLIT_REPEATS * triton_loss._SPLIT_LANES * consecutive
    for n_vocab in (*range(12_289, 12_400), 32_000, 50_304, 128_256, 151_936, 152_064, 262_144, 524_288):
        parts = triton_loss._parts(n_vocab, consecutive)
        size, blocks = parts["PART"], parts["BLOCKS"]
        last = n_vocab - (parts["PARTS"] - 1) * size
        assert 0 < last <= size and size % (8 * consecutive) == 0
        held = (blocks - 1) * block + parts["TAIL_R"] * block // triton_loss._SPLIT_REPEATS
        assert size <= held <= triton_loss._SPLIT_VECTORS * triton_loss._SPLIT_LANES * consecutive
        assert parts["WHOLE"] * block <= last and parts["WHOLE"] < blocks


def test_the_split_kernel_has_no_more_parts_than_a_warp_polls_for() -> None:
    """It also leaves the rows to the row kernel that it reads once."""
    for n_vocab, served in ((12_288, False), (12_289, True), (311_296, True), (311_297, False)):
        logits_NV = torch.empty(2, n_vocab, device="meta")
        assert triton_loss._splits(logits_NV, 16, tail=True, two=False) == served


@gpu
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"N{size[0]}-V{size[1]}")
def test_the_same_bits_beside_other_work(size: tuple[int, int], name: str) -> None:
    """Alone, beside matrix products, beside itself, in a replayed graph."""
    logits_NV, tokens = make(Size(*size, 16, "bf16", True))
    logits_NV, settings = logits_NV.detach(), SETTINGS[name]
    idle_N = torch.arange(size[0], device=DEVICE) % 11 == 10  # no weight
    weights = {name: getattr(tokens, name).masked_fill(idle_N, 0.0) for name in WEIGHTS}
    tokens = replace(tokens, **weights)

    def run(rows_NV: Tensor) -> TokenTerms:
        return triton_loss.loss_rows(rows_NV, tokens, settings, rows_NV)

    def result(rows_NV: Tensor, terms: TokenTerms) -> tuple:
        torch.cuda.synchronize()
        return rows_NV, terms

    first_NV = logits_NV.clone()
    first = result(first_NV, run(first_NV))
    assert not first[1].logp_N.isnan().any()
    for again in _others(logits_NV, run, result):
        assert backends.same(again, first)


def _others(logits_NV, run, result) -> Iterator[tuple]:
    other = torch.cuda.Stream()
    square = torch.randn(4096, 4096, dtype=torch.bfloat16, device=DEVICE)
    for _ in range(3):
        rows_NV = logits_NV.clone()
        torch.cuda.synchronize()
        with torch.cuda.stream(other):
            for _ in range(20):
                square @ square
        yield result(rows_NV, run(rows_NV))
    rows_NV, beside_NV = logits_NV.clone(), logits_NV.clone()
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        beside = run(beside_NV)
    terms = run(rows_NV)
    yield result(rows_NV, terms)
    yield result(beside_NV, beside)
    graph, rows_NV = torch.cuda.CUDAGraph(), logits_NV.clone()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        terms = run(rows_NV)
    for _ in range(3):
        rows_NV.copy_(logits_NV)
        graph.replay()
        yield result(rows_NV, terms)
