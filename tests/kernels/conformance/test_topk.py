"""topk_logprobs on every backend: exact ids, and log-probabilities against float64."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from smopd.kernels.types import TopK
from tests.kernels import backends
from tests.kernels.cases import DTYPES, HALF

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # from numpy in the interpreter
INF, NAN = math.inf, math.nan
each_backend = backends.each("topk_logprobs")
ATOL = {"cpp": 2e-6, "reference": 5e-6, "triton": 2e-5}
KINDS = ("normal", "ties", "masked", "wide", "ascending", "constant")


def rows_of(kind: str, n_rows: int, n_vocab: int) -> Tensor:
    generator = torch.Generator().manual_seed(n_vocab)
    logits_NV = 3 * torch.randn(n_rows, n_vocab, generator=generator)
    if kind == "ties":
        return logits_NV.round()
    if kind == "masked":
        hidden_NV = torch.rand(n_rows, n_vocab, generator=generator) < 0.95
        hidden_NV[:, n_vocab // 2] = False
        return logits_NV.masked_fill(hidden_NV, -INF)
    if kind == "wide":
        return 1000 * logits_NV
    if kind == "ascending":
        return logits_NV.sort(dim=-1).values
    if kind == "constant":
        return torch.full((n_rows, n_vocab), -7.25)
    return logits_NV


def topk(
    backend: str, logits_NV: Tensor, kappa: int, tokens_N: Tensor | None = None, temperature: float = 1.0
) -> TopK:
    options = {"token_ids_N": tokens_N, "temperature": temperature}
    return backends.call(backend, "topk_logprobs", logits_NV, kappa, **options)


def sorted_truth(logits_NV: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return all ids by a stable sort, with the lower of equal ones first, and all log-probabilities."""
    wide_NV = logits_NV.double()
    ids_NV = wide_NV.sort(dim=-1, descending=True, stable=True).indices
    return ids_NV, (wide_NV / temperature).log_softmax(-1)


def check(backend: str, logits_NV: Tensor, kappas: tuple[int, ...], temperature: float = 1.0) -> None:
    true_ids_NV, logps_NV = sorted_truth(logits_NV, temperature)
    rows = backends.rows_for(backend, len(logits_NV), 1)
    tokens_N = rows * 7919 % logits_NV.shape[1]
    close = {"rtol": 1e-6, "atol": ATOL[backend]}
    if logits_NV.dtype == torch.float64:
        close = {"rtol": 1e-12, "atol": 1e-12}
    elif backend == "reference":  # it rounds x / T to fp32
        most = float(logits_NV.double().nan_to_num(0.0, neginf=0.0).clamp(min=-1e30).abs().max())
        close["atol"] += 2.0**-22 * (most if most < 1e30 else 0.0)
    for kappa in kappas[-1:] if backends.interpreted(backend) else kappas:
        got = topk(backend, logits_NV[rows], kappa, tokens_N, temperature)
        ids_NS = true_ids_NV[rows, :kappa]
        wide = torch.float64 if logits_NV.dtype == torch.float64 else torch.float32
        assert got.ids_NS.dtype == torch.int32 and got.logps_NS.dtype == got.token_logp_N.dtype == wide
        assert torch.equal(got.ids_NS.long(), ids_NS)
        torch.testing.assert_close(got.logps_NS.double(), logps_NV[rows].gather(-1, ids_NS), **close)
        own_N = logps_NV[rows, tokens_N]
        torch.testing.assert_close(got.token_logp_N.double(), own_N, **close)


@each_backend
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_vocab", [1, 2, 31, 32, 33, 210, 2047, 2048, 2049, 5000], ids="V{}".format)
def test_equals_float64(n_vocab: int, kind: str, backend: str) -> None:
    few = backends.interpreted(backend)
    # Ties are slow in the interpreter; test_rows_that_are_hard_to_select_from has them too.
    backends.leave_to_a_gpu(backend, n_vocab not in (1, 33) and (n_vocab != 2049 or kind != "normal"))
    for place, dtype in enumerate(DTYPES if backend == "reference" else HALF):
        if few and (place + KINDS.index(kind) + n_vocab) % 3:
            continue  # the interpreter gets one dtype
        logits_NV = rows_of(kind, 5, n_vocab).to(DTYPES[dtype])
        kappas = sorted({0, 1, min(16, n_vocab), min(32, n_vocab), n_vocab, min(128, n_vocab)})
        kappas = [kappa for kappa in kappas if backend != "triton" or kappa <= 128]
        temperature = 0.7 if few or (place + n_vocab) % 2 else 1.0
        check(backend, logits_NV, tuple(kappas), temperature)


@each_backend
@pytest.mark.parametrize("dtype", HALF)
def test_a_whole_vocabulary(dtype: str, backend: str) -> None:
    backends.leave_to_a_gpu(backend, dtype != "bf16")
    logits_NV = rows_of("normal", 3, 151_936).to(DTYPES[dtype])
    check(backend, logits_NV, (0, 16), 0.7)
    assert topk(backend, logits_NV[:1], 3).token_logp_N is None


def near_the_worst(n_vocab: int, ulp: float) -> Tensor:
    """Return 64 segments with one large value each, except for the last; the first has a second value."""
    row_V = torch.full((n_vocab,), -1.0)
    row_V[: 63 * 8 : 8] = 100.0
    row_V[63 * 8], row_V[1024] = 1.0 + ulp, 1.0 + 5 * ulp
    return row_V


def selection_rows(n_vocab: int) -> dict[str, Tensor]:
    """Return rows that are hard for a selection by thresholds. 128 threads of a GPU read 8 or 4 ids each."""
    gen = torch.Generator().manual_seed(6)
    plain_V, id_V = torch.randn(n_vocab, generator=gen), torch.arange(n_vocab)
    rows = {
        "equal": torch.full((n_vocab,), 2.5),
        "increasing": id_V / 4096,
        "best in one thread": torch.where(id_V // 4 % 128 == 77, plain_V + 20, plain_V),
        "40 in one chunk's neighbours": torch.where(id_V % 8192 < 40, plain_V + 20, plain_V),
        "many -inf": plain_V.masked_fill(id_V % 331 != 7, -INF),
        "fewer than kappa finite": plain_V.masked_fill(id_V % 997 != 3, -INF),
        "ties at the worst": torch.where(id_V % 300 == 11, 9.0, plain_V.clamp(max=3.0)),
        "a tie in each 4": torch.where(id_V % 4 == 3, 1.0, -1.0),
        "a second chunk just above the worst (bf16)": near_the_worst(n_vocab, 2.0**-7),
        "a second chunk just above the worst (fp32)": near_the_worst(n_vocab, 2.0**-23),
        "two values": (plain_V > 0).float(),
        "both signs": torch.where(id_V % 500 == 1, plain_V.abs(), -plain_V.abs() - 1e-3),
    }
    rows["nan"] = plain_V.index_fill(0, torch.tensor([n_vocab - 2]), NAN)
    return rows


@each_backend
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("kind", selection_rows(9000))
def test_rows_that_are_hard_to_select_from(kind: str, dtype: str, backend: str) -> None:
    if kind == "nan" and backend == "reference":
        pytest.skip("the reference does not define the ids of a row with a NaN")
    odd = list(selection_rows(9000)).index(kind) % 2 == 1
    backends.leave_to_a_gpu(backend, odd == (dtype == "bf16"))  # the interpreter gets one dtype
    short = 9_001 if "one chunk" in kind else 4_601  # the former has a chunk every 8192 ids
    n_vocab = short if backends.interpreted(backend) else 17_001
    row_1V = selection_rows(n_vocab)[kind][None].to(DTYPES[dtype])
    few = (64,) if "chunk" in kind else (32,)
    for kappa in few if backends.interpreted(backend) else (1, 16, 32, 64, 128):
        got = topk(backend, row_1V, kappa)
        assert torch.equal(got.ids_NS.long(), sorted_truth(row_1V, 1.0)[0][:, :kappa])


@backends.each("topk_logprobs", but=("reference",))  # its x / T is infinite
def test_largest_floats_do_not_overflow(backend: str) -> None:
    logits_NV = torch.full((2, 300), -3.0e38)
    logits_NV[0, 296:] = torch.tensor([3.0e38, -3.0e38, 3.0e38, 0.0])
    expected = torch.tensor([2.0, 300.0]).log().neg()[:, None].expand(2, 2)
    for dtype, scale in product((torch.float32, torch.bfloat16), (1.0, 1e-20)):
        got = topk(backend, (scale * logits_NV).to(dtype), 2, temperature=0.7)
        assert got.ids_NS.tolist() == [[296, 298], [0, 1]]
        torch.testing.assert_close(got.logps_NS, expected, rtol=1e-6, atol=ATOL[backend])


@backends.each("topk_logprobs", but=("triton",))
@pytest.mark.parametrize("dtype", HALF)
def test_every_half_precision_value_is_converted(dtype: str, backend: str) -> None:
    """All 65536 bit patterns (for float32 the same values), one per row."""
    bits_N = torch.arange(-(2**15), 2**15).to(torch.int16)
    values_N = bits_N.view(torch.float16 if dtype == "fp32" else DTYPES[dtype]).to(DTYPES[dtype])
    values_N = values_N[
        values_N.isfinite() & (values_N.float().abs() < (1e37 if backend == "reference" else INF))
    ]
    check(backend, torch.stack([values_N, torch.zeros_like(values_N)], -1), (2,))


@each_backend
def test_again_and_alone_have_the_same_bits(backend: str) -> None:
    logits_NV, tokens_N = rows_of("normal", 3, 1271).bfloat16(), torch.tensor([1, 2, 3])
    whole = topk(backend, logits_NV, 16, tokens_N)
    assert backends.same(whole, topk(backend, logits_NV, 16, tokens_N))
    alone = topk(backend, logits_NV[1:2].clone(), 16, tokens_N[1:2])
    assert backends.same(alone, TopK(whole.ids_NS[1:2], whole.logps_NS[1:2], whole.token_logp_N[1:2]))


@backends.each("topk_logprobs", but=("reference", "triton"))
@pytest.mark.parametrize("n_vocab", [210, 70_000], ids="V{}".format)
def test_bits_do_not_depend_on_threads(n_vocab: int, backend: str, each_number_of_threads) -> None:
    logits_NV = rows_of("normal", 37, n_vocab)
    results = each_number_of_threads(lambda: topk(backend, logits_NV, 16))
    assert all(backends.same(result, results[0]) for result in results)


@each_backend
def test_rows_may_be_strided_and_ids_narrow(backend: str) -> None:
    backends.need(backend)
    wide_NV = rows_of("normal", 6, 300).to(backends.device(backend))  # moving it later would make it dense
    tokens_N = torch.tensor([0, 5, 1, 5, 232, 5], dtype=torch.int32)[::2]
    got = topk(backend, wide_NV[::2, 17:250], 9, tokens_N)
    want = topk(backend, wide_NV[::2, 17:250].contiguous(), 9, tokens_N.long())
    assert backends.same(got, want)


@each_backend
def test_no_rows_and_no_entries(backend: str) -> None:
    none = topk(backend, torch.empty(0, 10), 4, torch.empty(0, dtype=torch.int64))
    assert none.ids_NS.shape == none.logps_NS.shape == (0, 4) and none.token_logp_N.shape == (0,)
    assert topk(backend, torch.zeros(3, 10), 0).ids_NS.shape == (3, 0)
    check(backend, rows_of("normal", 2, 50), (0,))
