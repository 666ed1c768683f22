"""smopd_loss: the sum of the terms, autograd, and inplace=True. Rows: conformance/test_loss.py."""

import math
from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from smopd.kernels import cpp, dispatch
from smopd.kernels.tokens import BLOCK, reverse_weight
from smopd.kernels.types import TokenTerms
from smopd.ops import LossSettings, LossStats, LossTokens, linear_smopd_loss, smopd_loss, topk_forward_kl
from tests.kernels import backends, cases, float64

N, V = 12, 29
MANY = 40_003  # more rows than torch sums on one thread
SETTINGS = LossSettings(entropy_coef=0.1, opd_coef=0.7)
SUMS = ("pg_loss", "kl_loss", "entropy", "reverse_loss")
built = pytest.mark.skipif(cpp.unavailable() is not None, reason="smopd._C is not built")


def case_of(dtype: str = "fp64", **options) -> tuple[Tensor, LossTokens, LossSettings]:
    case = cases.loss_case((N, V, 2, 7), dtype, entropy=True, temperatures=(0.7, 1.0), **options)
    return case.logits_NV.clone().requires_grad_(), case.tokens, case.settings


@pytest.mark.parametrize("target", cases.TARGETS)
@pytest.mark.parametrize("old", [True, False])
def test_loss_is_the_weighted_sum_and_its_gradient_flows(old: bool, target: str) -> None:
    logits_NV, tokens, settings = case_of(target=target, old=old)
    loss, stats = smopd_loss(logits_NV, tokens, settings)
    truth = cases.LossCase(logits_NV.detach(), tokens, settings).truth
    for field in fields(LossStats):
        value = getattr(stats, field.name)
        assert not value.requires_grad
        if value.dim():
            float64.check_term(value.double(), getattr(truth.terms, field.name).double(), field.name)
    total = stats.pg_loss + settings.opd_coef * (stats.kl_loss + stats.reverse_loss)
    torch.testing.assert_close(loss, total - settings.entropy_coef * stats.entropy)
    (half_NV,) = torch.autograd.grad(0.5 * loss, logits_NV, retain_graph=True)
    torch.testing.assert_close(half_NV, 0.5 * truth.grad_NV, rtol=1e-9, atol=1e-12)
    loss.backward(retain_graph=True)
    loss.backward()
    assert torch.equal(logits_NV.grad, 4.0 * half_NV)


@pytest.mark.parametrize("form", ["dense", "linear"])
@pytest.mark.parametrize("backend", ["reference", pytest.param("cpp", marks=built)])
def test_the_loss_does_not_depend_on_threads(
    form: str, backend: str, each_number_of_threads, monkeypatch
) -> None:
    monkeypatch.setenv(dispatch.ENV, backend)
    logits_NV = cases.random_logits(MANY, 7)
    tokens = cases.random_tokens(logits_NV, cases.target_of("given", MANY, 7, 4))

    def sums() -> list[Tensor]:
        if form == "dense":
            loss, stats = smopd_loss(logits_NV, tokens, SETTINGS)
        else:  # the head is the identity: the products are exact in any order
            loss, stats = linear_smopd_loss(logits_NV, torch.eye(7), tokens, SETTINGS)
        return [loss, *(getattr(stats, name) for name in SUMS)]

    assert backends.same(*each_number_of_threads(sums, (1, 3)))


@backends.each("total_loss")
@pytest.mark.parametrize("n_rows", [0, 1, BLOCK + 1, 20_000])
@pytest.mark.parametrize("kind", ["all", "anchor alone", "kl_weight for both", "no coefficients"])
def test_every_backend_sums_the_terms(kind: str, n_rows: int, backend: str) -> None:
    """A term of weight or coefficient 0 adds 0, even if it is NaN."""
    generator = torch.Generator().manual_seed(4)
    values, weights = torch.randn(7, n_rows, generator=generator), torch.rand(4, n_rows, generator=generator)
    terms, settings = TokenTerms(*values[:5], torch.zeros(n_rows, dtype=torch.int8), *values[5:]), SETTINGS
    weights[:, ::3] = 0.0
    values[[1, 2, 5, 6], ::3] = torch.nan
    columns = dict(zip(("kl_weight_N", "ent_weight_N", "reverse_weight_N"), weights[1:], strict=True))
    if kind == "anchor alone":
        columns = {}
    elif kind == "kl_weight for both":
        columns = {"kl_weight_N": weights[1].bfloat16()}
    elif kind == "no coefficients":
        terms.kl_N[:], terms.entropy_N[:] = torch.nan, torch.inf
        settings = LossSettings(opd_coef=0.0)
    token_ids_N = torch.zeros(n_rows, dtype=torch.int64)
    tokens = LossTokens(token_ids_N=token_ids_N, adv_N=weights[0], pg_weight_N=weights[0], **columns)
    loss, stats = backends.call(backend, "total_loss", terms, tokens, settings)
    assert loss.dtype == stats.pg_loss.dtype == torch.float32 and loss.shape == stats.pg_loss.shape == ()
    parts = {
        "pg_loss": (1.0, terms.surrogate_N, tokens.pg_weight_N),
        "kl_loss": (settings.opd_coef, terms.kl_N, tokens.kl_weight_N),
        "entropy": (-settings.entropy_coef, terms.entropy_N, tokens.ent_weight_N),
        "reverse_loss": (settings.opd_coef, terms.reverse_N, reverse_weight(tokens)),
    }
    true = 0.0
    for name, (coef, value_N, weight_N) in parts.items():
        weight_N = torch.zeros(n_rows) if weight_N is None else weight_N.float()
        products_N = (weight_N * value_N)[weight_N != 0].double()
        total, size = float(products_N.sum()), float(products_N.abs().sum())
        found = float(getattr(stats, name))
        if math.isfinite(total):
            limit = 2.0**-24 * abs(total) if n_rows > BLOCK else 2.0**-21 * size
            assert abs(found - total) <= limit + 2.0**-48 * size
        else:
            assert math.isnan(found) == math.isnan(total)
        true += coef * total if coef != 0.0 else 0.0
    torch.testing.assert_close(float(loss), true, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("backend", ["reference", pytest.param("cpp", marks=built)])
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(("target", "tail"), [("given", True), ("repeats", False)])
def test_the_forward_kl_is_a_loss_whose_surrogate_is_minus_log_p(
    target: str, tail: bool, dtype: str, backend: str, monkeypatch
) -> None:
    """Its rows are loss_rows on every backend: conformance/test_loss.py. Weights are upstream gradients."""
    if (dtype, backend) == ("fp64", "cpp"):
        pytest.skip("only the reference gets float64")
    monkeypatch.setenv(dispatch.ENV, backend)
    options = {"temperatures": (0.7, 0.7), "reverse": None, "old": False, "opd_coef": 1.0}
    case = cases.loss_case((N, V, 2, 7), dtype, target, tail, **options)
    slopes_2N = torch.randn(2, N, generator=torch.Generator().manual_seed(5)).to(case.tokens.adv_N)
    for given in ((1, 1), (0, 1), (1, 0)):
        logp_slope_N, kl_slope_N = slopes_2N * torch.tensor(given)[:, None]
        weights = {"pg_weight_N": logp_slope_N, "kl_weight_N": kl_slope_N}
        tokens = replace(case.tokens, **weights, adv_N=-torch.ones_like(logp_slope_N))
        truth = cases.LossCase(case.logits_NV, tokens, case.settings).truth
        leaf_NV = cases.laid_out(case.logits_NV, "inside")[0].requires_grad_()
        sparse = (tokens.target_ids_NS, tokens.target_logps_NS)
        found = topk_forward_kl(leaf_NV, tokens.token_ids_N, *sparse, tail=tail, temperature=0.7)
        pairs = zip(found, weights.values(), strict=True)
        sum(slope_N @ out_N for out_N, slope_N in pairs if slope_N.any()).backward()
        for name, out_N in zip(("logp", "kl"), found, strict=True):
            float64.check_term(out_N.detach(), getattr(truth.terms, f"{name}_N"), name)
        float64.check_gradient(leaf_NV.grad, truth, backend)


def ready(shape: tuple[int, ...] = (N, V)) -> tuple[Tensor, LossTokens, Tensor, Tensor]:
    """Return a leaf of half the logits, tokens, the loss and the leaf's gradient."""
    leaf, tokens, _ = case_of()
    leaf = (0.5 * leaf.detach()).view(shape).requires_grad_()
    loss, _ = smopd_loss((2 * leaf).view(N, V), tokens)
    return leaf, tokens, loss.detach(), torch.autograd.grad(loss, leaf)[0]


@pytest.mark.parametrize(("shape", "cut"), [((N, V), lambda x: x), ((1, N, V), lambda x: x[0])])
def test_gradient_is_written_over_the_logits(shape: tuple, cut: Callable[[Tensor], Tensor]) -> None:
    """Also of a view of the whole tensor."""
    leaf, tokens, want_loss, want_grad = ready(shape)
    logits_NV = cut(2 * leaf)
    memory = logits_NV.data_ptr()
    loss, stats = smopd_loss(logits_NV, tokens, inplace=True)
    assert torch.equal(loss.detach(), want_loss) and not stats.kl_N.requires_grad
    assert logits_NV.data_ptr() == memory
    torch.testing.assert_close(logits_NV.detach(), want_grad.view(N, V) / 2)
    loss.backward()
    torch.testing.assert_close(leaf.grad, want_grad)


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("retain", [True, False])
def test_the_upstream_gradient_is_not_rounded_to_sixteen_bits(inplace: bool, retain: bool) -> None:
    """bf16 logits: the gradient is rounded before and after the multiplication, the factor is not."""
    leaf, tokens, _, _ = ready()
    grads = []
    for upstream in (1.0, 1 / 3):
        low = leaf.detach().bfloat16().requires_grad_()
        loss, _ = smopd_loss(low * 1, tokens, inplace=inplace)
        (upstream * loss).backward(retain_graph=retain)
        grads.append(low.grad)
    whole, third = grads
    assert third.equal((whole.float() * torch.tensor(1 / 3)).bfloat16())


def test_other_uses_of_the_logits_are_right_or_raise() -> None:
    leaf, tokens, _, want_grad = ready()

    def in_place(before=lambda x: 0.0, after=lambda x: 0.0) -> Tensor:
        logits_NV = 2 * leaf
        first = before(logits_NV)
        loss, _ = smopd_loss(logits_NV, tokens, inplace=True)
        return loss + first + after(logits_NV)

    in_place(before=lambda x: (3 * x).sum()).backward()
    torch.testing.assert_close(leaf.grad, want_grad + 6.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        in_place(before=lambda x: (x**2).sum()).backward()
    with pytest.raises(RuntimeError, match="used in another differentiable operation after inplace=True"):
        in_place(after=lambda x: x.sum()).backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        in_place(after=lambda x: x.detach().zero_().sum()).backward()
    for upstream in (1.0, 0.5):
        loss = upstream * in_place()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError):
            loss.backward()


def test_a_leaf_and_a_view_of_a_part_are_refused_and_untouched() -> None:
    leaf, tokens, _, _ = ready()
    before = leaf.detach().clone()
    for given in (leaf, leaf.view(N, V)):
        with pytest.raises(ValueError, match="logits_NV is a leaf"):
            smopd_loss(given, tokens, inplace=True)
    with pytest.raises(ValueError, match="is a view of 348 of the 696 elements"):
        smopd_loss(torch.cat([leaf, leaf])[:N], tokens, inplace=True)
    assert torch.equal(leaf.detach(), before)


def test_nothing_is_written_without_gradient() -> None:
    leaf, tokens, _, _ = ready()
    for logits_NV, enabled in ((2 * leaf.detach(), True), (2 * leaf, False)):
        with torch.set_grad_enabled(enabled):
            loss, _ = smopd_loss(logits_NV, tokens, inplace=True)
        assert torch.equal(logits_NV.detach(), 2 * leaf.detach()) and not loss.requires_grad
