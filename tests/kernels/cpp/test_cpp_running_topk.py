"""smopd._C's running top-kappa: logits in pieces of the vocabulary give the bits of whole rows."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from smopd.kernels import cpp, dispatch
from smopd.kernels.ops import linear_topk
from smopd.ops import linear_topk_logprobs, topk_logprobs
from tests.kernels import backends
from tests.kernels.conformance.test_topk import KINDS, rows_of

pytestmark = [
    pytest.mark.skipif(dispatch.cpp_unavailable() is not None, reason="smopd._C is not built"),
    pytest.mark.usefixtures("poisoned_memory"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
STEP = cpp.RunningTopK.step


def in_pieces(
    logits_NV: Tensor, kappa: int, token_ids_N: Tensor | None, temperature: float, width: int
) -> tuple[Tensor, ...]:
    running = cpp.RunningTopK(logits_NV, len(logits_NV), kappa, token_ids_N, temperature)
    for first in range(0, logits_NV.shape[1], width):
        running.add(logits_NV[:, first : first + width], first)
    return running.result()


@pytest.mark.parametrize("width", [STEP, 3 * STEP])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_vocab", [1, 33, 2047, 2048, 2049, 9001], ids="V{}".format)
def test_pieces_have_the_bits_of_whole_rows(n_vocab: int, kind: str, width: int) -> None:
    tokens_N = torch.arange(5) * 7919 % n_vocab
    kappas = {0, 1, min(16, n_vocab), min(64, n_vocab), min(128, n_vocab)}
    for dtype, kappa in itertools.product(DTYPES, kappas):
        logits_NV = rows_of(kind, 5, n_vocab).to(dtype)
        *got, right_N = in_pieces(logits_NV, kappa, tokens_N, 0.7, width)
        whole = torch.ops.smopd.topk_logprobs_cpu(logits_NV, kappa, tokens_N, 0.7)
        enough_N = (logits_NV > -math.inf).sum(-1) >= kappa
        assert torch.equal(right_N, enough_N)
        assert torch.equal(got[2][right_N], whole[2][right_N])
        assert torch.equal(got[0][right_N], whole[0][right_N])
        assert torch.equal(got[1][right_N], whole[1][right_N])


def test_a_row_with_nan_is_refused_wherever_it_is() -> None:
    logits_NV = rows_of("normal", 5, 3 * STEP)
    for n, place in enumerate((0, STEP - 1, STEP, 3 * STEP - 1)):
        logits_NV[n, place] = math.nan
    logits_NV[4, 7] = math.inf
    *_, right_N = in_pieces(logits_NV, 4, None, 1.0, STEP)
    assert right_N.tolist() == [False] * 4 + [True]


def test_threads_do_not_show(each_number_of_threads) -> None:
    logits_NV = rows_of("normal", 37, 9000)
    results = each_number_of_threads(lambda: in_pieces(logits_NV, 16, None, 1.0, STEP))
    assert all(backends.same(result, results[0]) for result in results)


@pytest.mark.parametrize("chunk_bytes", [None, 1, 5 * STEP * 4])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_head_in_pieces_equals_its_logits(dtype: torch.dtype, bias: bool, chunk_bytes: int | None) -> None:
    """With tokens masked by -inf, a row of NaN, and one with fewer than kappa tokens above -inf."""
    # A hidden size of whole AMX steps: otherwise oneDNN lets a row of NaN into the row before it.
    n_rows, n_vocab, n_hidden, kappa = 21, 3 * STEP + 77, 32, 32
    generator = torch.Generator().manual_seed(0)
    # Of products and sums that every dtype holds, whatever their order.
    weight_VD = rows_of("ties", n_hidden, n_vocab).T.to(dtype)
    weight_VD[:, 3] = 0.0
    weight_VD[100:110, 3] = -math.inf
    weight_VD[:, 4] = -1.0
    weight_VD[1000:1010, 4] = 1.0
    bias_V = torch.randn(n_vocab, generator=generator).round().to(dtype) if bias else None
    hidden_ND = torch.eye(n_rows, n_hidden, dtype=dtype)
    hidden_ND[:, 3] = 0.5
    hidden_ND[1] = math.nan
    hidden_ND[4, 4] = math.inf
    tokens_N = torch.arange(n_rows) * 1000 % n_vocab
    logits_NV = hidden_ND @ weight_VD.T
    if bias_V is not None:
        logits_NV += bias_V
    want = topk_logprobs(logits_NV, kappa, token_ids_N=tokens_N, temperature=0.7)
    got = linear_topk_logprobs(
        hidden_ND,
        weight_VD,
        kappa,
        token_ids_N=tokens_N,
        bias_V=bias_V,
        temperature=0.7,
        chunk_bytes=chunk_bytes,
    )
    assert (
        want.logps_NS[0].isfinite().all()
        and want.logps_NS[4].isinf().any()
        and want.logps_NS[1].isnan().all()
    )
    assert backends.same(got, want)


def test_a_head_holds_a_piece_of_its_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    held = []

    class Watched(cpp.RunningTopK):
        def add(self, logits_NP: Tensor, first: int) -> None:
            held.append(logits_NP.shape)
            super().add(logits_NP, first)

    monkeypatch.setattr(cpp, "RunningTopK", Watched)
    linear_topk_logprobs(torch.randn(1500, 4), torch.randn(9000, 4), 8)
    assert max(rows * width * 4 for rows, width in held) <= linear_topk.PIECE_BYTES
    assert {width for _, width in held} == {STEP, 9000 % STEP}
    assert sum(rows for rows, width in held if width < STEP) == 1500
    held.clear()
    linear_topk_logprobs(torch.randn(3, 4), torch.randn(9000, 4), 8)
    assert held == [(3, 9000)]
