"""linear_smopd_loss with recompute=True: tiles of the vocabulary against the dense loss, for every option."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from smopd.kernels.head import recompute as linear_recompute
from smopd.kernels.head.tiles import finish
from smopd.kernels.reference.loss import loss_rows
from smopd.kernels.reference.tiles import TileLoss
from smopd.kernels.tokens import TERMS
from smopd.ops import LossSettings, linear_smopd_loss, smopd_loss
from tests.kernels.head import linear_cases as cases

TILES = [(1, 5), (3, 8), (100, 16), (100, 37)]  # rows and columns of a tile


@pytest.fixture(params=TILES, ids=lambda tile: f"{tile[0]}x{tile[1]}")
def tile_bytes(request, monkeypatch: pytest.MonkeyPatch) -> int:
    rows, columns = request.param
    monkeypatch.setattr(linear_recompute, "MIN_PIECE", columns)
    monkeypatch.setattr(linear_recompute, "PIECE_UNIT", 1)
    return rows * columns * 8


@pytest.mark.parametrize("target", cases.TARGETS)
@pytest.mark.parametrize("name", cases.SETTINGS)
def test_equals_the_dense_loss(name: str, target: str, tile_bytes: int) -> None:
    settings = cases.SETTINGS[name]
    leaves = cases.head()
    logits = cases.dense(*leaves)
    tokens = cases.loss_tokens(logits, settings, target)
    want, want_stats = smopd_loss(logits, tokens, settings)
    got, stats = linear_smopd_loss(
        *leaves[:2], tokens, settings, bias_V=leaves[2], recompute=True, chunk_bytes=tile_bytes
    )
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    cases.assert_same_stats(stats, want_stats, rtol=1e-11, atol=1e-12)
    grads = torch.autograd.grad(0.5 * got, leaves)
    for gradient, truth in zip(grads, torch.autograd.grad(0.5 * want, leaves), strict=True):
        torch.testing.assert_close(gradient, truth, rtol=1e-9, atol=1e-12)


def test_tiles_are_what_was_asked(tile_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, bias = cases.head()
    tokens = cases.loss_tokens(cases.dense(hidden, weight, bias), LossSettings())
    sizes = []
    scan = TileLoss.scan
    monkeypatch.setattr(TileLoss, "scan", lambda *args: sizes.append(args[2].numel()) or scan(*args))
    linear_smopd_loss(hidden, weight, tokens, recompute=True, chunk_bytes=tile_bytes)
    assert sum(sizes) == (cases.N - 1) * cases.V  # one row counts nowhere
    assert max(sizes) <= tile_bytes // 8


@pytest.mark.parametrize("column", [0, 5, 20], ids=lambda column: f"column{column}")
@pytest.mark.parametrize("what", [torch.inf, -torch.inf, torch.nan, -3.4e38], ids=str)
@pytest.mark.parametrize("name", ["merged-tail", "pooled", "two-temperatures", "entropy"])
def test_rows_that_are_not_finite_are_as_in_the_reference(name: str, what: float, column: int) -> None:
    """One logit of each row but the first, and then all of them from that column on."""
    settings = cases.SETTINGS[name]
    for width in (1, cases.V - column):
        logits = cases.dense(*cases.head()).detach().float()
        tokens = cases.loss_tokens(logits, settings)
        logits[1:, column : column + width] = what
        want_grad, got_grad = torch.empty_like(logits), logits.clone()
        want = loss_rows(logits, tokens, settings, want_grad)
        plan = TileLoss.plan_of(tokens, settings, logits.dtype)
        sums, passes = plan.empty_sums(), TileLoss(plan)
        pieces = [(0, 5), (5, 8), (8, 20), (20, cases.V)]
        for start, stop in pieces:
            passes.scan(sums, logits[:, start:stop], 0, start)
        merged = finish(plan, sums)
        for start, stop in pieces:
            passes.gradient_(merged, got_grad[:, start:stop], 0, start)
        for term in TERMS:
            values = getattr(merged.terms, term), getattr(want, term)
            torch.testing.assert_close(*values, equal_nan=True, rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(got_grad, want_grad, equal_nan=True, rtol=1e-5, atol=1e-6)


def test_backward_twice_and_only_in_part() -> None:
    hidden, weight, bias = cases.head()
    tokens = cases.loss_tokens(cases.dense(hidden, weight, bias), LossSettings())
    loss = linear_smopd_loss(hidden, weight.detach(), tokens, bias_V=bias, recompute=True)[0]
    once = torch.autograd.grad(loss, (hidden, bias), retain_graph=True)
    again = torch.autograd.grad(loss, (hidden, bias))
    assert all(map(torch.equal, once, again))
    full = linear_smopd_loss(hidden, weight, tokens, bias_V=bias, recompute=True)[0]
    torch.testing.assert_close(torch.autograd.grad(full, hidden)[0], once[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("n_rows", [cases.N, 0], ids=["all-masked", "no-tokens"])
@pytest.mark.usefixtures("poisoned_memory")
def test_where_no_token_counts_gradients_are_zeros(n_rows: int, dtype: torch.dtype) -> None:
    hidden, weight, bias = cases.head(dtype)
    tokens = cases.loss_tokens(cases.dense(hidden, weight, bias).detach(), LossSettings())
    none_N = torch.zeros(cases.N)
    tokens = replace(tokens, pg_weight_N=none_N, kl_weight_N=none_N, ent_weight_N=none_N).rows(0, n_rows)
    loss, _ = linear_smopd_loss(hidden[:n_rows], weight, tokens, bias_V=bias, recompute=True)
    for gradient in torch.autograd.grad(loss, (hidden, weight, bias)):
        assert not gradient.any()


def test_tokens_changed_before_backward_change_nothing() -> None:
    hidden, weight, bias = cases.head()
    tokens = cases.loss_tokens(cases.dense(hidden, weight, bias).detach(), LossSettings(), "given")
    every_N = torch.ones(cases.N)
    tokens = replace(tokens, pg_weight_N=every_N)  # all count: the caller's own tensors are worked on
    want = torch.autograd.grad(
        linear_smopd_loss(hidden, weight, tokens, bias_V=bias, recompute=True)[0], (hidden, weight, bias)
    )
    loss, _ = linear_smopd_loss(hidden, weight, tokens, bias_V=bias, recompute=True)
    for field in fields(tokens):
        column = getattr(tokens, field.name)
        if column is not None:
            column.zero_()
    for got, true in zip(torch.autograd.grad(loss, (hidden, weight, bias)), want, strict=True):
        assert torch.equal(got, true)


def test_without_gradient_no_row_of_logits_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_recompute, "MIN_PIECE", 8)
    monkeypatch.setattr(linear_recompute, "PIECE_UNIT", 1)
    hidden, weight, _ = cases.head(bias=False)
    tokens = cases.loss_tokens(cases.dense(hidden, weight, None), LossSettings())
    want = linear_smopd_loss(hidden, weight, tokens)[0]
    widths = []
    logits_into = linear_recompute.logits_into
    monkeypatch.setattr(
        linear_recompute, "logits_into", lambda *args: widths.append(args[0].shape[1]) or logits_into(*args)
    )
    with torch.no_grad():
        got = linear_smopd_loss(hidden, weight, tokens, recompute=True, chunk_bytes=8 * 8 * cases.N)[0]
    torch.testing.assert_close(got, want.detach())
    assert max(widths) <= 8 and sum(widths) == cases.V
