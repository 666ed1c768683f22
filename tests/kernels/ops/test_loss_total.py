"""The loss as one number: the same bits on any number of threads, off by no more than its rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from smopd.kernels import dispatch
from smopd.kernels.tokens import BLOCK, steady_sum
from smopd.ops import LossSettings, LossStats, LossTokens, linear_smopd_loss, smopd_loss
from tests.kernels import cases

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


@pytest.mark.parametrize("form", ["dense", "linear", "recompute"])
def test_the_loss_does_not_depend_on_threads(form: str, threads: Callable, backend: str) -> None:
    logits_NV, tokens = rows_of(N)
    seen = []
    for count in (1, 2, 3):
        threads(count)
        if form == "dense":
            loss, stats = smopd_loss(logits_NV, tokens, SETTINGS)
        else:  # the head is the identity: the products are exact in any order
            recompute = form == "recompute"
            loss, stats = linear_smopd_loss(
                logits_NV, torch.eye(V), tokens, SETTINGS, recompute=recompute, compact=False
            )
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
