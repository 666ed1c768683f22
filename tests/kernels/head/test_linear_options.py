"""linear_smopd_loss: tokens left out, main_grad, what backward does with the kept gradients."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from smopd.kernels.head import loss as linear
from smopd.ops import LossSettings, LossStats, linear_smopd_loss
from tests.kernels.head import linear_cases as cases

DEFAULTS = LossSettings()
ROW_BYTES = 8 * 128
FORMS = pytest.mark.parametrize("recompute", [False, True], ids=["rows", "recompute"])


def build(
    dtype: torch.dtype = torch.float64, dead: tuple[int, ...] = (2,), settings: LossSettings = DEFAULTS
):
    leaves = cases.head(dtype)
    tokens = cases.loss_tokens(cases.dense(*leaves), settings)
    columns = {}
    for name in ("pg_weight_N", "kl_weight_N", "ent_weight_N"):
        columns[name] = 0.1 + getattr(tokens, name)
        columns[name][list(dead)] = 0.0
    return leaves, replace(tokens, **columns)


@FORMS
@pytest.mark.parametrize("compact", [None, False, True], ids=["default", "kept", "left-out"])
def test_tokens_that_count_nowhere_add_nothing(compact: bool | None, recompute: bool) -> None:
    dead = (0, 2, 3, 12)
    (hidden, weight, bias), tokens = build(dead=dead)
    alive = [n for n in range(cases.N) if n not in dead]
    index = torch.tensor(alive)
    kept = replace(
        tokens,
        **{
            field.name: getattr(tokens, field.name)[index]
            for field in fields(tokens)
            if getattr(tokens, field.name) is not None and field.name != "log_alpha"
        },
    )
    want, want_stats = linear_smopd_loss(hidden[index], weight, kept, bias_V=bias)
    want_grads = torch.autograd.grad(want, (hidden, weight, bias))

    broken = hidden.detach().clone()
    broken[list(dead)] = torch.tensor([torch.inf, torch.nan, -torch.inf, 1e300], dtype=torch.float64)[:, None]
    broken.requires_grad_()
    options = {"recompute": recompute, "compact": compact, "chunk_bytes": 4 * ROW_BYTES}
    got, stats = linear_smopd_loss(broken, weight, tokens, bias_V=bias, **options)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    grads = torch.autograd.grad(got, (broken, weight, bias))
    assert torch.equal(grads[0][list(dead)], torch.zeros(len(dead), cases.D, dtype=torch.float64))
    for gradient, truth in zip(grads, want_grads, strict=True):
        torch.testing.assert_close(gradient, truth, rtol=1e-10, atol=1e-13)
    for field in fields(LossStats):
        value = getattr(stats, field.name)
        if field.name.endswith("_N"):
            assert not value[list(dead)].any(), field.name
            torch.testing.assert_close(value[index], getattr(want_stats, field.name))


@FORMS
@pytest.mark.parametrize("compact", [None, False], ids=["left-out", "kept"])
def test_no_token_counts(compact: bool | None, recompute: bool) -> None:
    (hidden, weight, bias), tokens = build(dead=tuple(range(cases.N)))
    loss, stats = linear_smopd_loss(hidden, weight, tokens, bias_V=bias, compact=compact, recompute=recompute)
    loss.backward()
    assert loss.item() == 0.0 and not stats.logp_N.any() and stats.kl_N.shape == (cases.N,)
    assert not any(leaf.grad.any() for leaf in (hidden, weight, bias))


def test_only_counting_tokens_reach_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    (hidden, weight, _), tokens = build(dead=(0, 5, 6))
    rows = []
    logits_into = linear.logits_into
    monkeypatch.setattr(
        linear, "logits_into", lambda *args: rows.append(args[1].shape[0]) or logits_into(*args)
    )
    linear_smopd_loss(hidden, weight, tokens, chunk_bytes=4 * ROW_BYTES)
    assert sum(rows) == cases.N - 3


def on_device(device: str, leaves, tokens):
    columns = {f.name: getattr(tokens, f.name) for f in fields(tokens)}
    moved = {name: x.to(device) for name, x in columns.items() if isinstance(x, torch.Tensor)}
    return [leaf.detach().to(device).requires_grad_() for leaf in leaves], replace(tokens, **moved)


@FORMS
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["fp64", "fp32", "bf16"]
)
def test_main_grad_is_added_to(dtype: torch.dtype, device: str, recompute: bool) -> None:
    (hidden, weight, bias), tokens = on_device(device, *build(dtype))
    want = torch.autograd.grad(
        0.5 * linear_smopd_loss(hidden, weight, tokens, bias_V=bias)[0], (hidden, weight, bias)
    )
    wide = torch.promote_types(dtype, torch.float32)
    main_grad = torch.full((cases.V, cases.D), 0.25, dtype=wide, device=device)
    options = {"main_grad_VD": main_grad, "recompute": recompute, "chunk_bytes": 4 * ROW_BYTES}
    for times in (1, 2):
        loss, _ = linear_smopd_loss(hidden, weight, tokens, bias_V=bias, **options)
        (0.5 * loss).backward()
        assert weight.grad is None
        eps, wide_eps = torch.finfo(dtype).eps, torch.finfo(wide).eps
        rounding = {"rtol": max(2 * eps, 16 * wide_eps), "atol": 16 * wide_eps}
        torch.testing.assert_close(main_grad - 0.25, times * want[1].to(wide), **rounding)


def test_main_grad_that_does_not_fit_is_refused() -> None:
    (hidden, weight, _), tokens = build()
    with pytest.raises(
        ValueError, match=r"^linear_smopd_loss: main_grad_VD has dtype float32, expected float64$"
    ):
        linear_smopd_loss(hidden, weight, tokens, main_grad_VD=torch.zeros(cases.V, cases.D))
    with pytest.raises(ValueError, match=r"^linear_smopd_loss: main_grad_VD has shape \(2, 2\), expected"):
        linear_smopd_loss(hidden, weight, tokens, main_grad_VD=torch.zeros(2, 2, dtype=torch.float64))
    with pytest.raises(ValueError, match="requires no gradient"):
        main_grad = torch.zeros(cases.V, cases.D, dtype=torch.float64)
        linear_smopd_loss(hidden, weight.detach(), tokens, main_grad_VD=main_grad)


@pytest.mark.parametrize("upstream", [1.0, 0.5])
def test_the_sum_of_the_weights_gradient_is_given_away(
    upstream: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """weight.grad is the memory that the chunks were summed in: no second (V, D)."""
    (hidden, weight, _), tokens = build()
    sums = set()
    into = linear.weight_gradient_into

    def note(out, *args, **options):
        sums.add(out.data_ptr())
        into(out, *args, **options)

    monkeypatch.setattr(linear, "weight_gradient_into", note)
    loss, _ = linear_smopd_loss(hidden, weight, tokens, chunk_bytes=4 * ROW_BYTES)
    (upstream * loss).backward()
    assert {weight.grad.data_ptr()} == sums


def test_backward_again() -> None:
    (hidden, weight, _), tokens = build()
    want = torch.autograd.grad(linear_smopd_loss(hidden, weight, tokens)[0], (hidden, weight))
    loss, _ = linear_smopd_loss(hidden, weight, tokens)
    for factor in (0.5, 2.0):
        grads = torch.autograd.grad(factor * loss, (hidden, weight), retain_graph=True)
        for gradient, whole in zip(grads, want, strict=True):
            torch.testing.assert_close(gradient, factor * whole)
    torch.autograd.grad(0.5 * loss, (hidden, weight))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(0.5 * loss, (hidden, weight))


@FORMS
def test_repeated_runs_have_the_same_bits_and_chunks_do_not_matter(recompute: bool) -> None:
    (hidden, weight, bias), tokens = build(torch.float32, settings=LossSettings(entropy_coef=0.1))
    runs = []
    for rows in (3, 3, 100):
        options = {"recompute": recompute, "chunk_bytes": rows * ROW_BYTES // 2}
        loss, stats = linear_smopd_loss(
            hidden, weight, tokens, LossSettings(entropy_coef=0.1), bias_V=bias, **options
        )
        grads = torch.autograd.grad(loss, (hidden, weight, bias))
        runs.append([loss.detach(), *(getattr(stats, f.name) for f in fields(LossStats)), *grads])
    assert all(map(torch.equal, runs[0], runs[1]))
    for first, other in zip(runs[0], runs[2], strict=True):
        torch.testing.assert_close(first, other, rtol=2e-6, atol=2e-6)
