"""Comparison of results with float64. NaN and unwritten memory never pass.

Our results must be within the bounds of the operations' tests. Eager forms and other libraries round more: a
log-softmax in bf16 is off by 0.01 nats. They fail only if they compute something else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from bench.harness.types import Expected, Outputs, Provider

LOGP = 2e-5  # bound of log-probabilities and losses, in nats
CANCELLATION = 2.0**-20  # added to a gradient's bound, relative to the terms whose difference it is
ULPS = {torch.float32: 4, torch.bfloat16: 1, torch.float16: 1}
LINEAR_NORM = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}  # bound in norm after a GEMM
WORST_ROW = 16.0  # a row may be off by this many times the bound in norm, relative to the mean row
ROWS_UP_TO = 1e-3  # larger bounds in norm do not apply to one row, because a 16-bit head rounds its logits
REFERENCE_SLACK = 4.0  # factor of the bounds for the reference, plain fp32 torch
OTHERS_NORM = 0.5  # bound in norm of eager forms and other libraries. A log-softmax in bf16 was off by 0.2
OTHERS_SCALAR = 0.02  # added to this bound for a single number, which may be near 0


def judge(provider: Provider, outputs: Outputs, truth: dict[str, Expected]) -> tuple[str | None, dict, float]:
    """Return the fault (or None), the largest error of each output, and the largest ratio error / bound."""
    known = [name for name in outputs if name in truth]
    if not known:
        return f"gives {sorted(outputs)}, expected some of {sorted(truth)}", {}, 0.0
    fault, errors, worst = None, {}, 0.0
    for name in known:
        expected = truth[name]
        got, value = _aligned(outputs[name], expected)
        if got.shape != value.shape:
            fault = fault or f"{name} has shape {tuple(got.shape)}, expected {tuple(value.shape)}"
        elif expected.exact is not None:
            n_wrong = int(((got != value) & expected.exact.to(got.device)).sum())
            if n_wrong and provider.kind == "ours":
                fault = fault or f"{name} differs in {n_wrong} places, expected none"
        elif got.numel():
            errors[name], share = _distance(got, value, expected, provider)
            worst = max(worst, share)
            if not share <= 1.0:  # also for NaN
                fault = fault or f"{name} is off by {errors[name]:.3g}, {share:.3g} times its bound"
    return fault, errors, worst


def _aligned(got: Tensor, expected: Expected) -> tuple[Tensor, Tensor]:
    got = got.detach()
    got = got if expected.of is None else expected.of(got)
    got = got if expected.rows is None else got[expected.rows]
    wide = torch.float64 if expected.exact is None else torch.int64
    return got.to(wide), expected.value.to(device=got.device, dtype=wide)


def _distance(got: Tensor, value: Tensor, expected: Expected, provider: Provider) -> tuple[float, float]:
    """Return the largest error (for our bounds in norm, the relative norm) and its share of the bound."""
    difference = torch.where(got == value, 0.0, (got - value).abs())  # equal infinities are no error
    size = float(value.norm().clamp(min=1e-30))
    if provider.kind != "ours":
        allowed = OTHERS_NORM * size + (OTHERS_SCALAR if got.ndim == 0 else 0.0)
        return float(difference.max()), float(difference.norm()) / allowed
    slack = REFERENCE_SLACK if provider.backend == "reference" else 1.0
    if not expected.norm:
        bound = torch.as_tensor(expected.bound, dtype=torch.float64).to(got.device).expand_as(difference)
        share = torch.where(difference == 0, 0.0, difference / bound)
        return float(difference.max()), float(share.max()) / slack
    error, bound = float(difference.norm()) / size, float(expected.bound)
    if got.ndim and bound <= ROWS_UP_TO:
        rows = difference.reshape(got.shape[0], -1).norm(dim=1)
        error = max(error, float(rows.max()) / size * got.shape[0] ** 0.5 / WORST_ROW)
    return error, error / bound / slack


def clear_places(values_NP: Tensor, kappa: int) -> Tensor:
    """Return whether each value differs from its neighbors by more than rounding, as (N, kappa) bools.

    values_NP: each row's float64 values in descending order, preferably kappa + 1 of them.
    """
    apart = values_NP[:, :-1] - values_NP[:, 1:] > 2 * LOGP
    sure = torch.ones_like(values_NP, dtype=torch.bool)
    sure[:, :-1] &= apart
    sure[:, 1:] &= apart
    return sure[:, :kappa]


def ulp(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the distance between neighboring numbers of dtype at value."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(value.abs().clamp(min=info.tiny))
    return torch.ldexp(torch.full_like(value, info.eps), exponent - 1)


def gradient_bound(gradient: Tensor, dtype: torch.dtype, scale: Tensor) -> Tensor:
    """Return the bound of |g - g64|. `scale` is the size of the terms of g, w (p_v + sum q_v + |c_pg|)."""
    return ULPS[dtype] * ulp(gradient, dtype) + CANCELLATION * scale


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill new memory with NaN or the largest integer, to reveal results that are not written."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")  # the only mode in which torch fills new memory
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
