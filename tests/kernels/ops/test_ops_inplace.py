"""smopd_loss(inplace=True): each promise."""

from __future__ import annotations

import pytest
import torch

from smopd.ops import smopd_loss
from tests.kernels import float64

N, V = 8, 21


def setup(shape: tuple[int, ...] = (N, V)):
    torch.manual_seed(0)
    leaf = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    ids, logps = float64.random_teachers(N, 2, V, 5, seed=1)
    tokens = float64.random_tokens(
        N,
        V,
        2 * leaf.detach().reshape(N, V),
        1.0,
        0,
        teacher_ids_NMS=ids,
        teacher_logps_NMS=logps,
        log_alpha=torch.tensor([0.5, 0.5]).log(),
    )
    want_loss, _ = smopd_loss((2 * leaf).reshape(N, V), tokens)
    return leaf, tokens, want_loss.detach(), torch.autograd.grad(want_loss, leaf)[0]


def test_gradient_is_written_over_the_logits() -> None:
    leaf, tokens, want_loss, want_grad = setup()
    logits = 2 * leaf
    memory = logits.data_ptr()
    loss, stats = smopd_loss(logits, tokens, inplace=True)
    assert torch.equal(loss.detach(), want_loss) and not stats.kl_N.requires_grad
    assert logits.data_ptr() == memory
    torch.testing.assert_close(logits.detach(), want_grad / 2)
    loss.backward()
    torch.testing.assert_close(leaf.grad, want_grad)


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("retain", [True, False])
def test_the_upstream_gradient_is_not_rounded_to_sixteen_bits(inplace: bool, retain: bool) -> None:
    """bf16 logits: the gradient is rounded once before the factor and once after it, the factor never."""
    leaf, tokens, _, _ = setup()
    grads = []
    for upstream in (1.0, 1 / 3):
        low = leaf.detach().bfloat16().requires_grad_()
        loss, _ = smopd_loss(low * 1, tokens, inplace=inplace)
        (upstream * loss).backward(retain_graph=retain)
        grads.append(low.grad)
    whole, third = grads
    assert third.equal((whole.float() * torch.tensor(1 / 3)).bfloat16())


def test_logits_used_before_by_an_operation_that_needs_their_values_raises() -> None:
    leaf, tokens, _, _ = setup()
    logits = 2 * leaf
    other = (logits**2).sum()
    loss, _ = smopd_loss(logits, tokens, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss + other).backward()


def test_logits_used_before_without_their_values_is_right() -> None:
    leaf, tokens, _, want_grad = setup()
    logits = 2 * leaf
    other = (3 * logits).sum()
    loss, _ = smopd_loss(logits, tokens, inplace=True)
    (loss + other).backward()
    torch.testing.assert_close(leaf.grad, want_grad + 6.0)


def test_logits_used_after_raises() -> None:
    leaf, tokens, _, _ = setup()
    logits = 2 * leaf
    loss, _ = smopd_loss(logits, tokens, inplace=True)
    with pytest.raises(RuntimeError, match="used in another differentiable operation after inplace=True"):
        (loss + logits.sum()).backward()


def test_logits_overwritten_after_raises() -> None:
    leaf, tokens, _, _ = setup()
    logits = 2 * leaf
    loss, _ = smopd_loss(logits, tokens, inplace=True)
    with torch.no_grad():
        logits.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_leaf_is_refused_and_untouched() -> None:
    leaf, tokens, _, _ = setup()
    before = leaf.detach().clone()
    with pytest.raises(ValueError, match="logits_NV is a leaf"):
        smopd_loss(leaf, tokens, inplace=True)
    with pytest.raises(ValueError, match="logits_NV is a leaf"):
        smopd_loss(leaf.view(N, V), tokens, inplace=True)
    assert torch.equal(leaf.detach(), before)


def test_nothing_is_written_without_gradient() -> None:
    leaf, tokens, _, _ = setup()
    plain = 2 * leaf.detach()
    before = plain.clone()
    loss, _ = smopd_loss(plain, tokens, inplace=True)
    assert torch.equal(plain, before) and not loss.requires_grad
    logits = 2 * leaf
    with torch.no_grad():
        loss, _ = smopd_loss(logits, tokens, inplace=True)
    assert torch.equal(logits.detach(), before) and not loss.requires_grad


@pytest.mark.parametrize("upstream", [1.0, 0.5])
def test_second_backward_raises(upstream: float) -> None:
    leaf, tokens, _, _ = setup()
    loss, _ = smopd_loss(2 * leaf, tokens, inplace=True)
    loss = upstream * loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError):
        loss.backward()


@pytest.mark.parametrize("cut", [lambda x: x[0], lambda x: x.view(N, V), lambda x: x.flatten(0, 1)])
def test_a_view_of_the_whole_tensor_is_served(cut) -> None:
    leaf, tokens, _, want_grad = setup((1, N, V))
    logits = cut(2 * leaf)
    loss, _ = smopd_loss(logits, tokens, inplace=True)
    torch.testing.assert_close(logits.detach(), want_grad[0] / 2)
    loss.backward()
    torch.testing.assert_close(leaf.grad, want_grad)


def test_a_view_of_a_part_is_refused() -> None:
    leaf, tokens, _, _ = setup()
    wide = torch.cat([2 * leaf, 2 * leaf])
    with pytest.raises(ValueError, match="is a view of 168 of the 336 elements"):
        smopd_loss(wide[:N], tokens, inplace=True)
