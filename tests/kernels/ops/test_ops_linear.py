"""linear_topk_logprobs and linear_smopd_loss against the dense forms: chunks, bias, frozen, recompute."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from smopd.kernels.head import loss as linear
from smopd.kernels.head import recompute as linear_recompute
from smopd.ops import (
    LossSettings,
    LossStats,
    linear_smopd_loss,
    linear_topk_logprobs,
    smopd_loss,
    topk_logprobs,
)
from tests.kernels import float64
from tests.kernels.head import linear_cases

N, V, D = 13, 31, 6
ONE_ROW = V * 8
CHUNKS = [1, ONE_ROW, 5 * ONE_ROW, 1 << 28]


def inputs(dtype: torch.dtype = torch.float64, bias: bool = True):
    torch.manual_seed(0)
    hidden = torch.randn(N, D).to(dtype).requires_grad_()
    weight = torch.randn(V, D).to(dtype).requires_grad_()
    bias_V = torch.randn(V).to(dtype).requires_grad_() if bias else None
    return hidden, weight, bias_V


def loss_tokens(logits, temperature: float = 1.0):
    ids, logps = float64.random_teachers(N, 2, V, 7, seed=3)
    log_alpha = torch.tensor([0.4, 0.6], dtype=torch.float64).log()
    teachers = {"teacher_ids_NMS": ids, "teacher_logps_NMS": logps, "log_alpha": log_alpha}
    return float64.random_tokens(N, V, logits, temperature, 0, **teachers)


def dense_logits(hidden, weight, bias):
    return torch.nn.functional.linear(hidden, weight, bias)


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("kappa", [0, 5, V])
def test_topk_equals_dense(chunk_bytes: int, bias: bool, kappa: int) -> None:
    hidden, weight, bias_V = inputs(bias=bias)
    tokens = torch.randint(0, V, (N,))
    got = linear_topk_logprobs(
        hidden, weight, kappa, token_ids_N=tokens, bias_V=bias_V, temperature=0.7, chunk_bytes=chunk_bytes
    )
    want = topk_logprobs(dense_logits(hidden, weight, bias_V), kappa, token_ids_N=tokens, temperature=0.7)
    assert torch.equal(got.ids_NS, want.ids_NS)
    torch.testing.assert_close(got.logps_NS, want.logps_NS)
    torch.testing.assert_close(got.token_logp_N, want.token_logp_N)
    assert not got.logps_NS.requires_grad


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
@pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recompute"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_loss_equals_dense(chunk_bytes: int, recompute: bool, bias: bool) -> None:
    hidden, weight, bias_V = inputs(bias=bias)
    settings = LossSettings(entropy_coef=0.1, temperature=0.7)
    tokens = loss_tokens(dense_logits(hidden, weight, bias_V), 0.7)
    leaves = [t for t in (hidden, weight, bias_V) if t is not None]
    want, want_stats = smopd_loss(dense_logits(hidden, weight, bias_V), tokens, settings)
    want_grads = torch.autograd.grad(0.5 * want, leaves)
    got, stats = linear_smopd_loss(
        hidden, weight, tokens, settings, bias_V=bias_V, chunk_bytes=chunk_bytes, recompute=recompute
    )
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    for field in fields(LossStats):
        torch.testing.assert_close(getattr(stats, field.name), getattr(want_stats, field.name))
    for a, b in zip(torch.autograd.grad(0.5 * got, leaves), want_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recompute"])
def test_gradcheck_and_dense_truth(recompute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_recompute, "MIN_PIECE", 8)
    hidden, weight, bias_V = inputs()
    tokens = loss_tokens(dense_logits(hidden, weight, bias_V))

    def loss(h, w, b):
        return linear_smopd_loss(h, w, tokens, bias_V=b, recompute=recompute, chunk_bytes=4 * ONE_ROW)[0]

    leaves = (hidden, weight, bias_V)
    assert torch.autograd.gradcheck(loss, leaves, **float64.ALL_AT_ONCE)
    got, truth = loss(*leaves), float64.loss(dense_logits(*leaves), tokens, LossSettings())[0]
    torch.testing.assert_close(got, truth, rtol=1e-12, atol=1e-12)
    gradients = (torch.autograd.grad(value, leaves) for value in (got, truth))
    for ours, true in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recompute"])
def test_frozen_tensors_get_and_cost_no_gradient(recompute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, bias_V = inputs()
    tokens = loss_tokens(dense_logits(hidden, weight, bias_V))
    full = linear_smopd_loss(hidden, weight, tokens, bias_V=bias_V)[0]
    want = torch.autograd.grad(full, hidden)[0]

    def refuse(*_, **__):
        raise AssertionError("the weight's gradient was computed for a frozen weight")

    for module in (linear, linear_recompute):
        monkeypatch.setattr(module, "weight_gradient_into", refuse)
    frozen = (weight.detach(), bias_V.detach())
    loss = linear_smopd_loss(hidden, frozen[0], tokens, bias_V=frozen[1], recompute=recompute)[0]
    loss.backward()
    torch.testing.assert_close(hidden.grad, want, rtol=1e-10, atol=1e-13)
    assert frozen[0].grad is None


def test_only_the_weight_needs_a_gradient() -> None:
    hidden, weight, _ = inputs(bias=False)
    tokens = loss_tokens(dense_logits(hidden, weight, None))
    want = torch.autograd.grad(linear_smopd_loss(hidden, weight, tokens)[0], weight)[0]
    linear_smopd_loss(hidden.detach(), weight, tokens)[0].backward()
    assert torch.equal(weight.grad, want)


def test_without_gradient_only_the_loss_is_made() -> None:
    hidden, weight, _ = inputs(bias=False)
    tokens = loss_tokens(dense_logits(hidden, weight, None))
    want = linear_smopd_loss(hidden, weight, tokens)[0]
    with torch.no_grad():
        loss, stats = linear_smopd_loss(hidden, weight, tokens)
    assert not loss.requires_grad and torch.equal(loss, want.detach()) and stats.logp_N.shape == (N,)


def test_recompute_keeps_the_inputs_alone() -> None:
    hidden, weight, bias_V = inputs()
    tokens = loss_tokens(dense_logits(hidden, weight, bias_V))
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        linear_smopd_loss(hidden, weight, tokens, bias_V=bias_V, recompute=True)
    assert {t.data_ptr() for t in saved} == {hidden.data_ptr(), weight.data_ptr(), bias_V.data_ptr()}


def test_no_logits_of_all_tokens_are_ever_held() -> None:
    hidden = torch.randn(512, 8, requires_grad=True)
    weight = torch.randn(1000, 8, requires_grad=True)
    tokens = float64.random_tokens(512, 1000, hidden.detach() @ weight.detach().T, 1.0, 0, reverse_adv_N=None)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            largest = max(
                [largest, *(t.numel() for t in torch.utils._pytree.tree_leaves(out) if hasattr(t, "numel"))]
            )
            return out

    with Watch():
        linear_smopd_loss(hidden, weight, tokens, chunk_bytes=64 * 1024 * 4)[0].backward()
        linear_topk_logprobs(hidden, weight, 4, chunk_bytes=64 * 1024 * 4)
    assert largest == 64 * 1024  # 1000 columns, in rows of a multiple of 128 bytes


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
@pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recompute"])
@pytest.mark.parametrize("name", linear_cases.SETTINGS)
def test_low_precision(name: str, dtype: torch.dtype, recompute: bool) -> None:
    leaves = linear_cases.head(dtype)
    settings = linear_cases.SETTINGS[name]
    tokens = linear_cases.loss_tokens(
        dense_logits(*leaves), settings, "given" if "pooled" in name else "teachers"
    )
    loss, _ = linear_smopd_loss(
        *leaves[:2], tokens, settings, bias_V=leaves[2], recompute=recompute, chunk_bytes=4 * ONE_ROW
    )
    assert loss.dtype == torch.float32
    grads = torch.autograd.grad(loss, leaves)
    assert all(grad.dtype == dtype for grad in grads)
    linear_cases.assert_by_the_rule(loss, grads, leaves, tokens, settings)


def test_weight_gradient_is_summed_in_fp32() -> None:
    """4096 equal contributions of one token each: a bf16 sum would stop growing after 256 of them."""
    n_tokens = 4096
    hidden = torch.ones(n_tokens, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    tokens = float64.random_tokens(
        n_tokens,
        2,
        torch.zeros(n_tokens, 2),
        1.0,
        0,
        token_ids_N=torch.zeros(n_tokens, dtype=torch.int64),
        adv_N=torch.ones(n_tokens),
        pg_weight_N=torch.ones(n_tokens),
        old_logp_N=None,
        reverse_adv_N=None,
    )
    loss, _ = linear_smopd_loss(hidden, weight, tokens, chunk_bytes=8)
    loss.backward()
    assert weight.grad[:, 0].tolist() == [-n_tokens / 2, n_tokens / 2]


def test_autocast_does_not_lower_the_precision() -> None:
    hidden, weight, bias_V = inputs(torch.float32)
    tokens = loss_tokens(dense_logits(hidden, weight, bias_V).detach())
    want = linear_smopd_loss(hidden, weight, tokens, bias_V=bias_V)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_smopd_loss(hidden, weight, tokens, bias_V=bias_V)[0]
    assert torch.equal(loss, want)


def test_no_tokens() -> None:
    hidden, weight, _ = inputs(bias=False)
    tokens = loss_tokens(dense_logits(hidden, weight, None))
    loss, _ = linear_smopd_loss(hidden[:0], weight, tokens.rows(0, 0))
    loss.backward()
    assert loss.item() == 0.0 and torch.equal(weight.grad, torch.zeros_like(weight))
    out = linear_topk_logprobs(hidden[:0], weight, 4, token_ids_N=tokens.token_ids_N[:0])
    assert out.ids_NS.shape == (0, 4) and out.token_logp_N.shape == (0,)
