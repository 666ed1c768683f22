"""NaN in the C++ kernels' small inputs: none gets lost, and none comes through where its coefficient is 0."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from smopd.kernels import cpp
from smopd.kernels.types import KlOptions, LossSettings, LossTokens, SparseTarget
from tests.kernels.cpp import cpp_rows
from tests.kernels.cpp.cpp_rows import DTYPES

cpp_rows.need_extension()
pytestmark = pytest.mark.usefixtures("poisoned_memory")

N, V, S = 5, 2500, 6  # more than a block of a row
TEMPERATURES = {"same": (1.0, 1.0), "two": (0.7, 1.0)}
FULL_PAYLOADS = [0x7FFFFFFF, -1]  # of a float32 NaN, both signs: rounding to bf16 carries out of the exponent


def with_value(tokens: LossTokens, name: str, row: int, value: Tensor | float) -> LossTokens:
    """The first entry of the row becomes value."""
    column = getattr(tokens, name).clone()
    column[row].view(-1)[:1] = value
    return replace(tokens, **{name: column})


def gradient(logits_NV: Tensor, tokens: LossTokens, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """And the KL."""
    grad_NV = torch.empty_like(logits_NV)
    kl_N = cpp.loss_rows(logits_NV, tokens, settings, grad_NV).kl_N
    return grad_NV, kl_N


@pytest.mark.parametrize("temperatures", TEMPERATURES)
@pytest.mark.parametrize("tail", [True, False], ids=["tail", "no tail"])
@pytest.mark.parametrize("kind", ["given", "teachers"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_nan_of_a_teacher_where_the_kl_has_no_coefficient(
    dtype: torch.dtype, kind: str, tail: bool, temperatures: str
) -> None:
    """The gradient is, bit for bit, that of an empty slot; the KL says NaN."""
    policy, kl = TEMPERATURES[temperatures]
    logits_NV = cpp_rows.random_logits(N, V, dtype)
    settings = LossSettings(kappa=2 * S, tail=tail, temperature=policy, kl_temperature=kl, entropy_coef=0.1)
    tokens = cpp_rows.random_tokens(logits_NV, cpp_rows.target_of(kind, N, V, S, True))
    name = {"given": "target_logps_NS", "teachers": "teacher_logps_NMS"}[kind]
    unweighted = with_value(tokens, "kl_weight_N", 1, 0.0)
    for given, options in ((tokens, replace(settings, opd_coef=0.0)), (unweighted, settings)):
        broken, empty = (with_value(given, name, 1, value) for value in (math.nan, -math.inf))
        grad_NV, kl_N = gradient(logits_NV, broken, options)
        assert kl_N.isnan().tolist() == [row == 1 for row in range(N)]
        assert bool(grad_NV[1].any())
        assert torch.equal(grad_NV, gradient(logits_NV, empty, options)[0])
    broken = with_value(with_value(tokens, name, 1, math.nan), "kl_weight_N", 1, 1e-30)
    assert bool(gradient(logits_NV, broken, settings)[0][1].isnan().all())


@pytest.mark.parametrize("tail", [True, False], ids=["tail", "no tail"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_nan_of_a_target_where_the_kl_has_no_upstream_gradient(dtype: torch.dtype, tail: bool) -> None:
    logits_NV = cpp_rows.random_logits(N, V, dtype)
    target = cpp_rows.target_of("given", N, V, S, True)
    assert isinstance(target, SparseTarget)
    options, dlogp_N = KlOptions(tail=tail, temperature=0.7), torch.randn(N)

    def gradient_of(value: float, dkl_N: Tensor | None) -> Tensor:
        logps_NS = target.logps_NS.clone()
        logps_NS[1, 0] = value
        changed = SparseTarget(target.ids_NS, logps_NS)
        return cpp.forward_kl_gradient(logits_NV, torch.arange(N), changed, options, dlogp_N, dkl_N)

    dkl_N = torch.ones(N)
    assert gradient_of(math.nan, dkl_N).isnan().all(1).tolist() == [row == 1 for row in range(N)]
    dkl_N[1] = 0.0
    for upstream_N in (dkl_N, None):
        grad_NV = gradient_of(math.nan, upstream_N)
        assert torch.equal(grad_NV, gradient_of(-math.inf, upstream_N)) and bool(grad_NV[1].any())


@pytest.mark.parametrize("temperatures", TEMPERATURES)
@pytest.mark.parametrize("entropy_coef", [0.0, 0.1], ids=["no entropy", "entropy"])
@pytest.mark.parametrize("payload", FULL_PAYLOADS, ids=hex)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_nan_of_any_payload_reaches_the_whole_row(
    dtype: torch.dtype, payload: int, entropy_coef: float, temperatures: str
) -> None:
    policy, kl = TEMPERATURES[temperatures]
    nan = torch.tensor(payload, dtype=torch.int32).view(torch.float32)
    logits_NV = cpp_rows.random_logits(N, V, dtype)
    tokens = cpp_rows.random_tokens(logits_NV, cpp_rows.target_of("given", N, V, S, True))
    settings = LossSettings(
        temperature=policy, kl_temperature=kl, entropy_coef=entropy_coef, reverse_kl_surrogate="ppo"
    )
    names = ["adv_N", "pg_weight_N", "old_logp_N", "kl_weight_N", "reverse_adv_N", "reverse_weight_N"]
    names += ["target_logps_NS", *(["ent_weight_N"] if entropy_coef else [])]
    for name in names:
        grad_NV, _ = gradient(logits_NV, with_value(tokens, name, 0, nan), settings)
        assert int(grad_NV[0].isnan().sum()) == V, name
        assert bool(grad_NV[1:].isfinite().all()), name
