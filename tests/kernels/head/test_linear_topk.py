"""linear_topk_logprobs: the dense result whatever the chunks, in pieces where C++ serves; its operator."""

from __future__ import annotations

import pytest
import torch

from smopd.ops import linear_topk_logprobs, topk_logprobs
from tests.kernels.head import linear_cases as cases

ROW_BYTES = 8 * 48


@pytest.mark.parametrize("chunk_bytes", [1, ROW_BYTES, 5 * ROW_BYTES, 1 << 28])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("kappa", [0, 5, cases.V])
def test_equals_the_dense_form(chunk_bytes: int, bias: bool, kappa: int) -> None:
    hidden, weight, bias_V = cases.head(bias=bias)
    tokens_N = torch.arange(cases.N)
    options = {"token_ids_N": tokens_N, "temperature": 0.7}
    got = linear_topk_logprobs(hidden, weight, kappa, bias_V=bias_V, chunk_bytes=chunk_bytes, **options)
    want = topk_logprobs(cases.dense(hidden, weight, bias_V), kappa, **options)
    assert torch.equal(got.ids_NS, want.ids_NS) and not got.logps_NS.requires_grad
    torch.testing.assert_close(got.logps_NS, want.logps_NS)
    torch.testing.assert_close(got.token_logp_N, want.token_logp_N)


def test_opcheck_and_compile() -> None:
    hidden, weight, bias = (leaf.detach().float() for leaf in cases.head())
    operator = torch.ops.smopd.linear_topk_logprobs.default
    torch.library.opcheck(operator, (hidden, weight, bias, 5, torch.arange(cases.N), 0.7, None))
    torch.library.opcheck(operator, (hidden, weight, None, 0, None, 1.0, 4 * 1024))

    def call(hidden, weight):
        top = linear_topk_logprobs(hidden.tanh(), weight, 3, token_ids_N=torch.arange(cases.N))
        return top.ids_NS, top.logps_NS, top.token_logp_N

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(hidden, weight), call(hidden, weight), strict=True):
        assert torch.equal(got, want)
