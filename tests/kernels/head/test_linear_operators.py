"""smopd::linear_loss and smopd::linear_topk_logprobs: opcheck, and the public functions under compile."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from smopd import ops
from smopd.kernels.ops.loss import flat_objective
from tests.kernels.head import linear_cases as cases

SETTINGS = ops.LossSettings(entropy_coef=0.1, kl_temperature=0.8)


def inputs(dtype: torch.dtype = torch.float32):
    leaves = cases.head(dtype)
    return leaves, cases.loss_tokens(cases.dense(*leaves), SETTINGS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("need", [(True, True, True), (True, False, False)], ids=["all", "hidden"])
def test_opcheck(dtype: torch.dtype, need: tuple[bool, bool, bool]) -> None:
    (hidden, weight, bias), tokens = inputs(dtype)
    leaves = [
        leaf if needed else leaf.detach() for leaf, needed in zip((hidden, weight, bias), need, strict=True)
    ]
    objective = flat_objective(tokens, SETTINGS)
    operator = torch.ops.smopd.linear_loss.default
    torch.library.opcheck(operator, (*leaves, *objective, 4 * 1024, None, *need))
    top = torch.ops.smopd.linear_topk_logprobs.default
    head = (hidden.detach(), weight.detach(), None)
    torch.library.opcheck(top, (*head, 5, tokens.token_ids_N, 0.7, None))
    torch.library.opcheck(top, (*head, 0, None, 1.0, 4 * 1024))


@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
def test_compile_fullgraph(with_bias: bool) -> None:
    leaves, tokens = inputs()
    leaves = leaves if with_bias else leaves[:2]
    tokens = replace(tokens, token_ids_N=tokens.token_ids_N.int())

    def call(hidden, weight, bias=None):
        hidden = hidden.tanh()
        loss, stats = ops.linear_smopd_loss(hidden, weight, tokens, SETTINGS, bias_V=bias, chunk_bytes=4096)
        top = ops.linear_topk_logprobs(hidden, weight, 3, token_ids_N=tokens.token_ids_N, bias_V=bias)
        return 0.5 * loss, stats.kl_N, stats.clipped_N, top.ids_NS, top.token_logp_N

    def run(function):
        outputs = function(*leaves)
        return [*outputs, *torch.autograd.grad(outputs[0], leaves)]

    got = run(torch.compile(call, fullgraph=True, backend="aot_eager"))
    for a, b in zip(got, run(call), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
