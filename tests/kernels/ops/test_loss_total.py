"""The loss as one number: the same bits on any number of threads, off by no more than its rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from smopd.kernels import dispatch
from smopd.kernels.tokens import BLOCK, reverse_weight, steady_sum
from smopd.kernels.types import TokenTerms
from smopd.ops import LossSettings, LossStats, LossTokens, linear_smopd_loss, smopd_loss
from tests.kernels import backends, cases

N, V = 100_003, 7  # beyond what torch sums on one thread
SETTINGS = LossSettings(entropy_coef=0.1, opd_coef=0.7)
SUMS = ("pg_loss", "kl_loss", "entropy", "reverse_loss")
built = pytest.mark.skipif(dispatch.cpp_unavailable() is not None, reason="smopd._C is not built")


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(params=["reference", pytest.param("cpp", marks=built)])
def backend(request, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(dispatch.ENV, request.param)
    return request.param


def rows_of(n_rows: int) -> tuple[Tensor, LossTokens]:
    logits_NV = cases.random_logits(n_rows, V)
    return logits_NV, cases.random_tokens(logits_NV, cases.target_of("given", n_rows, V, 4))


def sums_of(loss: Tensor, stats: LossStats) -> list[float]:
    return [float(loss), *(float(getattr(stats, name)) for name in SUMS)]


@pytest.mark.parametrize("form", ["dense", "linear"])
def test_the_loss_does_not_depend_on_threads(form: str, threads: Callable, backend: str) -> None:
    logits_NV, tokens = rows_of(N)
    seen = []
    for count in (1, 2, 3):
        threads(count)
        if form == "dense":
            loss, stats = smopd_loss(logits_NV, tokens, SETTINGS)
        else:  # the head is the identity: the products are exact in any order
            loss, stats = linear_smopd_loss(logits_NV, torch.eye(V), tokens, SETTINGS)
        seen.append(sums_of(loss, stats))
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("n_rows", [0, 1, BLOCK, BLOCK + 1, 40_000, N, BLOCK**2 + 1])
def test_a_sum_is_within_its_rounding(n_rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    values_N = torch.randn(n_rows, generator=generator, dtype=dtype).requires_grad_()
    total = steady_sum(values_N)
    true, size = math.fsum(values_N.tolist()), float(values_N.detach().double().abs().sum())
    assert total.dtype == dtype and total.shape == ()
    bound = 2.0**-48 * size  # 32 roundings in float64
    if dtype == torch.float32:
        bound += 2.0**-24 * abs(true) if n_rows > BLOCK else 2.0**-21 * size
    assert abs(float(total.detach()) - true) <= bound
    total.backward()
    assert torch.equal(values_N.grad, torch.ones_like(values_N))


def terms_of(n_rows: int) -> TokenTerms:
    values = torch.randn(7, n_rows, generator=torch.Generator().manual_seed(3))
    clipped_N = torch.zeros(n_rows, dtype=torch.int8)
    return TokenTerms(*values[:5], clipped_N, *values[5:])


@backends.each("total_loss")
@pytest.mark.parametrize("n_rows", [0, 1, 1025, 20_000])
@pytest.mark.parametrize("kind", ["all", "anchor alone", "kl_weight for both", "no coefficients"])
def test_every_backend_sums_the_terms(kind: str, n_rows: int, backend: str) -> None:
    """A term of weight 0 adds nothing, NaN or not; nor does one whose coefficient is 0."""
    terms, settings = terms_of(n_rows), SETTINGS
    weights = torch.rand(4, n_rows, generator=torch.Generator().manual_seed(4))
    weights[:, ::3] = 0.0
    for term_N in (terms.surrogate_N, terms.kl_N, terms.entropy_N, terms.reverse_N):
        term_N[::3] = torch.nan
    columns = dict(zip(("kl_weight_N", "ent_weight_N", "reverse_weight_N"), weights[1:], strict=True))
    if kind == "anchor alone":
        columns = {}
    elif kind == "kl_weight for both":
        columns = {"kl_weight_N": weights[1].bfloat16()}
    elif kind == "no coefficients":
        terms.kl_N[:], terms.entropy_N[:] = torch.nan, torch.inf
        settings = LossSettings(opd_coef=0.0)
    tokens = LossTokens(
        token_ids_N=torch.zeros(n_rows, dtype=torch.int64),
        adv_N=weights[0],
        pg_weight_N=weights[0],
        **columns,
    )
    loss, stats = backends.call(backend, "total_loss", terms, tokens, settings)
    assert loss.dtype == stats.pg_loss.dtype == torch.float32 and loss.shape == stats.pg_loss.shape == ()
    pairs = {
        "pg_loss": (terms.surrogate_N, tokens.pg_weight_N),
        "kl_loss": (terms.kl_N, tokens.kl_weight_N),
        "entropy": (terms.entropy_N, tokens.ent_weight_N),
        "reverse_loss": (terms.reverse_N, reverse_weight(tokens)),
    }
    true = 0.0
    coefs = {"pg_loss": 1.0, "kl_loss": settings.opd_coef, "reverse_loss": settings.opd_coef}
    for name, (value_N, weight_N) in pairs.items():
        products_N = torch.zeros(n_rows) if weight_N is None else weight_N.float() * value_N
        products_N = products_N[weight_N != 0] if weight_N is not None else products_N
        total, size = float(products_N.double().sum()), float(products_N.double().abs().sum())
        found, coef = float(getattr(stats, name)), coefs.get(name, -settings.entropy_coef)
        if math.isfinite(total):
            limit = 2.0**-24 * abs(total) if n_rows > BLOCK else 2.0**-21 * size
            assert abs(found - total) <= limit + 2.0**-48 * size
        else:
            assert math.isnan(found) == math.isnan(total)
        true += coef * total if coef != 0.0 else 0.0
    torch.testing.assert_close(float(loss), true, rtol=1e-5, atol=1e-4)
