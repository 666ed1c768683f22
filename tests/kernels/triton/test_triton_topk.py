"""The Triton topk_logprobs: ids exactly, log-probabilities to float64.

Natively on a GPU; in Triton's interpreter where there is none, which costs 0.3 s a row whatever its length.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.kernels.triton.device import DEVICE, gpu, needs_cuda

# isort: split
from smopd import ops
from smopd.kernels.reference import topk as reference
from smopd.kernels.triton import topk as triton_topk
from smopd.kernels.types import TopK
from tests.kernels import cases

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ATOL = 2e-5  # nats; KERNELS.md
INF = math.inf

# The interpreter's maximum of a row of NaN says so.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.usefixtures("poisoned_outputs"),
]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return 3.0 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def topk(logits_NV: Tensor, kappa: int, token_ids_N: Tensor | None = None, temperature: float = 1.0) -> TopK:
    tokens = None if token_ids_N is None else token_ids_N.to(DEVICE)
    out = triton_topk.topk_logprobs(logits_NV.to(DEVICE), kappa, token_ids_N=tokens, temperature=temperature)
    token_logp_N = None if out.token_logp_N is None else out.token_logp_N.cpu()
    return TopK(out.ids_NS.cpu(), out.logps_NS.cpu(), token_logp_N)


def check(logits_NV: Tensor, kappa: int, temperature: float = 1.0) -> None:
    n_rows, n_vocab = logits_NV.shape
    token_ids_N = torch.randint(0, n_vocab, (n_rows,), generator=torch.Generator().manual_seed(n_vocab))
    got = topk(logits_NV, kappa, token_ids_N, temperature)
    true = reference.topk_logprobs(
        logits_NV.double(), kappa, token_ids_N=token_ids_N, temperature=temperature
    )
    assert got.ids_NS.dtype == torch.int32 and got.logps_NS.dtype == torch.float32
    assert torch.equal(got.ids_NS, true.ids_NS)
    close = {"rtol": 1e-6, "atol": ATOL, "equal_nan": True}
    torch.testing.assert_close(got.logps_NS.double(), true.logps_NS, **close)
    assert got.token_logp_N is not None
    torch.testing.assert_close(got.token_logp_N.double(), true.token_logp_N, **close)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("n_rows", "n_vocab", "kappa", "temperature"),
    [(1, 7, 7, 0.7), (2, 1271, 17, 1.0), (1, 1, 1, 1.0), (1, 200, 128, 1.3)],
    ids=lambda value: str(value),
)
def test_against_float64(dtype, n_rows: int, n_vocab: int, kappa: int, temperature: float) -> None:
    check(randn(n_rows, n_vocab, seed=n_vocab).to(dtype), kappa, temperature)


@pytest.mark.parametrize("case", cases.INTERPRETED, ids=str)
def test_shared_cases(case: cases.Case) -> None:
    check(randn(case.N, case.V).to(case.torch_dtype), case.kappa)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ties_go_to_the_lowest_id_whatever_lane_and_round_they_fall_in(dtype) -> None:
    """Longer than a block of the stream; few distinct values, so that every level of the selection ties."""
    gen = torch.Generator().manual_seed(5)
    rows_NV = torch.stack(
        [
            torch.zeros(17000),
            torch.randint(0, 2, (17000,), generator=gen).float(),
            (torch.rand(17000, generator=gen) < 1e-3).float(),
            torch.where(torch.rand(17000, generator=gen) < 0.999, -INF, 0.0),
        ]
    )
    check(rows_NV.to(dtype), 20)


def test_one_maximum_anywhere_is_found_with_its_lowest_copy() -> None:
    """The first round of a later thread lies before the second round of an earlier one."""
    copies = ([1024, 8], [8, 1023, 1024], [8191, 8192])
    logits_NV = torch.zeros(3, 8200)
    for n, ids in enumerate(copies):
        logits_NV[n, ids] = 1.0
    for dtype in (torch.bfloat16, torch.float32):
        assert topk(logits_NV.to(dtype), 1).ids_NS[:, 0].tolist() == [min(ids) for ids in copies]


HOSTILE = {
    "nan": [1.0, math.nan, 2.0, 0.0],
    "nan and -inf": [-INF, math.nan, -INF, -INF],
    "nan and +inf": [INF, math.nan, 0.0, 0.0],
    "all nan": [math.nan] * 4,
    "all -inf": [-INF] * 4,
    "one +inf": [0.0, INF, 1.0, -INF],
    "one finite": [-INF, -INF, -3.0, -INF],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_rows(case: str, dtype) -> None:
    """As in float64, between two plain rows; a NaN comes first, as on the CPU."""
    row = HOSTILE[case]
    logits_NV = randn(3, 300)
    if case.startswith(("all", "nan and -inf", "one finite")):
        logits_NV[1] = row[0]
    logits_NV[1, 296:] = torch.tensor(row)
    logits_NV = logits_NV.to(dtype)
    if "nan" not in case:
        check(logits_NV, 8)
        return
    got = topk(logits_NV, 8, torch.tensor([0, 3, 299]))
    true = reference.topk_logprobs(logits_NV.double(), 8, token_ids_N=torch.tensor([0, 3, 299]))
    assert torch.equal(got.ids_NS[::2], true.ids_NS[::2])
    assert got.logps_NS[1].isnan().all() and got.token_logp_N is not None and got.token_logp_N[1].isnan()
    assert not got.logps_NS[::2].isnan().any()
    assert got.ids_NS[1].tolist()[:1] == [0 if case == "all nan" else 297]
    assert len(set(got.ids_NS[1].tolist())) == 8


def test_largest_floats_do_not_overflow() -> None:
    """float64 itself cannot add log 2 to 3e38."""
    logits_NV = torch.full((2, 300), -3.0e38)
    logits_NV[0, 296:] = torch.tensor([3.0e38, -3.0e38, 3.0e38, 0.0])
    for dtype in (torch.float32, torch.bfloat16):
        got = topk(logits_NV.to(dtype), 2)
        assert got.ids_NS.tolist() == [[296, 298], [0, 1]]
        expected = torch.tensor([2.0, 300.0]).log().neg()[:, None].expand(2, 2)
        torch.testing.assert_close(got.logps_NS, expected, rtol=1e-6, atol=ATOL)


def test_zeros_of_both_signs_are_one_value() -> None:
    for dtype in DTYPES:
        got = topk(torch.tensor([[-0.0, 0.0, -1.0, -0.0, 0.0]], dtype=dtype), 4)
        assert got.ids_NS.tolist() == [[0, 1, 3, 4]] and got.logps_NS.unique().numel() == 1


def test_masked_stretches_do_not_disturb_the_sum() -> None:
    """Whole threads see nothing but -inf or the lowest finite value, before and after the plain part."""
    logits_NV = randn(2, 17000)
    logits_NV[0, :9000] = -INF
    logits_NV[1, 9000:] = torch.finfo(torch.float32).min
    check(logits_NV, 16)


def test_the_last_chunk_of_the_widest_vocabulary() -> None:
    """Its number fills the key's 16 bits; the values around it are the lowest and the largest."""
    logits_NV = torch.full((2, triton_topk.MAX_VOCAB), -INF, dtype=torch.bfloat16)
    logits_NV[0, -3:] = torch.tensor([-1.0, 2.0, -3.0])
    logits_NV[1] = 5.0
    check(logits_NV, 5)


def test_a_bounded_scratch_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    logits_NV = randn(3, 300)
    whole = topk(logits_NV, 4, torch.tensor([1, 2, 3]))
    monkeypatch.setattr(triton_topk, "SCRATCH_BYTES", 4096)
    parts = topk(logits_NV, 4, torch.tensor([1, 2, 3]))
    assert torch.equal(whole.ids_NS, parts.ids_NS) and torch.equal(whole.logps_NS, parts.logps_NS)
    assert whole.token_logp_N is not None and torch.equal(whole.token_logp_N, parts.token_logp_N)


def test_repeated_and_alone_bitwise_equal() -> None:
    logits_NV = randn(3, 1271).to(torch.bfloat16)
    first, again = topk(logits_NV, 16), topk(logits_NV, 16)
    alone = topk(logits_NV[1:2].clone(), 16)
    assert torch.equal(first.ids_NS, again.ids_NS) and torch.equal(first.logps_NS, again.logps_NS)
    assert torch.equal(first.ids_NS[1:2], alone.ids_NS) and torch.equal(first.logps_NS[1:2], alone.logps_NS)


def test_rows_may_be_strided_and_ids_narrow() -> None:
    view_NV = randn(4, 300)[::2, 17:250]
    token_ids_N = torch.tensor([0, 5, 232, 5], dtype=torch.int32)[::2]
    logits_NV = randn(4, 300).to(DEVICE)[::2, 17:250]
    got = triton_topk.topk_logprobs(logits_NV, 9, token_ids_N=token_ids_N.to(DEVICE))
    want = topk(view_NV.contiguous(), 9, token_ids_N.long())
    assert torch.equal(got.ids_NS.cpu(), want.ids_NS) and torch.equal(got.logps_NS.cpu(), want.logps_NS)
    assert got.token_logp_N is not None and torch.equal(got.token_logp_N.cpu(), want.token_logp_N)


def test_empty_shapes_and_tokens_alone() -> None:
    got = topk(torch.zeros(0, 10), 4, torch.zeros(0, dtype=torch.int64))
    assert got.ids_NS.shape == got.logps_NS.shape == (0, 4)
    assert got.token_logp_N is not None and got.token_logp_N.shape == (0,)
    assert topk(torch.zeros(3, 10), 0).ids_NS.shape == (3, 0)
    check(randn(2, 50), 0)


def test_what_is_not_served_is_said() -> None:
    plain = torch.zeros(2, 200)
    assert triton_topk.unserved("topk_logprobs", plain, kappa=128) is None
    assert "kappa is 129" in str(triton_topk.unserved("topk_logprobs", plain, kappa=129))
    assert "float64" in str(triton_topk.unserved("topk_logprobs", plain.double(), kappa=1))
    wide = torch.empty(1, triton_topk.MAX_VOCAB + 1, device="meta")
    assert "V is 524289" in str(triton_topk.unserved("topk_logprobs", wide, kappa=1))
    with pytest.raises(ValueError, match="topk_logprobs: kappa is 129, expected at most 128"):
        topk(plain, 129)


@gpu
@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kappa", [16, 32, 64, 128])
def test_large_on_the_gpu(dtype, kappa: int) -> None:
    for n_rows, n_vocab in ((41, 1271), (512, 151936), (33, 151937), (3, 524288)):
        check(randn(n_rows, n_vocab).to(dtype), kappa)


@gpu
@needs_cuda
@pytest.mark.parametrize("case", [*cases.SMALL, *cases.FULL], ids=str)
def test_teachers_at_the_shared_cases_on_the_gpu(case: cases.Case) -> None:
    logits_NV = randn(case.N, case.V).to(DEVICE, case.torch_dtype)
    teachers = [logits_NV.roll(m, 1) for m in range(case.M)]
    got = ops.topk_logprobs(teachers, case.kappa)
    for m, teacher_NV in enumerate(teachers):
        true = reference.topk_logprobs(teacher_NV.double(), case.kappa)
        assert torch.equal(got.ids_NS[:, m], true.ids_NS)
        torch.testing.assert_close(got.logps_NS[:, m].double(), true.logps_NS, rtol=1e-6, atol=ATOL)


@gpu
@needs_cuda
@pytest.mark.xdist_group("large memory")
def test_captured_in_a_graph_and_beyond_32_bit_offsets() -> None:
    logits_NV = torch.randn(15000, 151936, dtype=torch.bfloat16, device=DEVICE)
    want = triton_topk.topk_logprobs(logits_NV, 16)
    tail = reference.topk_logprobs(logits_NV[-3:], 16)
    assert torch.equal(want.ids_NS[-3:], tail.ids_NS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = triton_topk.topk_logprobs(logits_NV, 16)
    graph.replay()
    assert torch.equal(got.ids_NS, want.ids_NS) and torch.equal(got.logps_NS, want.logps_NS)
