"""What a caller may get wrong, or leave in rows that do not count: ids out of range, NaN of a teacher."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from smopd.kernels import dispatch
from smopd.ops import LossTokens, linear_smopd_loss, smopd_loss, topk_forward_kl, topk_logprobs
from tests.kernels import cases

N, V, BAD = 64, 2000, 60  # BAD: a row behind many others
WEIGHTS = ("pg_weight_N", "kl_weight_N", "ent_weight_N", "reverse_weight_N")
IDS = {"repeats": "target_ids_NS", "pooled": "teacher_ids_NMS"}
built = pytest.mark.skipif(dispatch.cpp_unavailable() is not None, reason="smopd._C is not built")


@pytest.fixture(params=["reference", pytest.param("cpp", marks=built)])
def backend(request, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(dispatch.ENV, request.param)
    return request.param


def at_bad_row(tokens: LossTokens, name: str, value: float) -> LossTokens:
    """The first of the row's entries becomes value."""
    column = getattr(tokens, name).clone()
    column[BAD].view(-1)[0] = value
    return replace(tokens, **{name: column})


def rows_of(kind: str) -> tuple[Tensor, LossTokens]:
    case = cases.loss_case((N, V, 2, 6), target=kind)
    reverse = {"reverse_weight_N": torch.ones(N)}
    return case.logits_NV.clone(), replace(case.tokens, **reverse)


@pytest.mark.parametrize("kind", IDS)
def test_a_bad_id_is_a_value_error_before_anything_is_written(kind: str, backend: str) -> None:
    logits_NV, tokens = rows_of(kind)
    for name in (IDS[kind], "token_ids_N"):
        broken = at_bad_row(tokens, name, V)
        own_NV = logits_NV.clone().requires_grad_() * 1.0
        with pytest.raises(ValueError, match=rf"^smopd_loss: {name} holds 1 ids outside \[0, {V}\)"):
            smopd_loss(own_NV, broken, inplace=True)
        assert torch.equal(own_NV, logits_NV)
        head = (torch.zeros(N, 2), torch.zeros(V, 2))
        with pytest.raises(ValueError, match=rf"^linear_smopd_loss: {name} holds 1 ids"):
            linear_smopd_loss(*head, broken)
    bad_ids_N = broken.token_ids_N
    with pytest.raises(ValueError, match=r"^topk_logprobs: token_ids_N holds 1 ids"):
        topk_logprobs(logits_NV, 2, token_ids_N=bad_ids_N)
    if kind == "repeats":
        with pytest.raises(ValueError, match=r"^forward_kl: token_ids_N holds 1 ids"):
            topk_forward_kl(logits_NV, bad_ids_N, tokens.target_ids_NS, tokens.target_logps_NS)


@pytest.mark.parametrize("kind", IDS)
def test_ids_of_a_token_that_counts_nowhere_are_not_read(kind: str, backend: str) -> None:
    logits_NV, tokens = rows_of(kind)
    for name in WEIGHTS:
        column_N = getattr(tokens, name).clone()
        column_N[BAD] = 0.0
        tokens = replace(tokens, **{name: column_N})
    ignored = at_bad_row(at_bad_row(tokens, "token_ids_N", -100), IDS[kind], V)
    logits_NV.requires_grad_()
    grads = [torch.autograd.grad(smopd_loss(logits_NV, each)[0], logits_NV)[0] for each in (tokens, ignored)]
    assert torch.equal(*grads)
    generator = torch.Generator().manual_seed(0)
    head = [torch.randn(size, 4, generator=generator).requires_grad_() for size in (N, V)]
    grads = [torch.autograd.grad(linear_smopd_loss(*head, each)[0], head[0])[0] for each in (tokens, ignored)]
    assert torch.equal(*grads)
