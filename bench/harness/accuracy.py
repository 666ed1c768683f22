"""Is a result right? Compared in float64; NaN and unwritten memory never pass.

The bounds are those of the operations' own tests. Eager forms and peers may have a multiple of them
(Provider.slack): a row is refused for computing something else, not for rounding as it always has.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from bench.harness.types import Expected, Outputs, Provider, Ranking

LOGP = 2e-5  # nats, of log-probabilities and losses
CANCELLATION = 2.0**-20  # of the terms that a gradient is the difference of
ULPS = {torch.float32: 4, torch.bfloat16: 1, torch.float16: 1}
M_PERTURB, FREED_BYTE = -6, 0x40  # mallopt(3)
WORST_ROW = 16.0  # times a bound in norm: of one row's error over the root mean square of the rows' norms
FEW_ROWS = 8
FEW_NORM = 0.5  # in norm, of the rows between the few: a log-softmax in bf16 was 0.2 off near the teachers
NORM_MOST = 0.1  # in norm: whatever its slack, a provider beyond it computes something else
LINEAR_NORM = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}  # a GEMM comes first


def judge(provider: Provider, outputs: Outputs, truth: dict[str, Expected]) -> tuple[str | None, dict, float]:
    """(what is wrong or None, the largest error of each output, the largest share of its bound)."""
    known = [name for name in outputs if name in truth]
    if not known:
        return f"gives {sorted(outputs)}, expected some of {sorted(truth)}", {}, 0.0
    fault, errors, worst = None, {}, 0.0
    for name in known:
        expected = truth[name]
        got, value = _aligned(outputs[name], expected)
        if got.shape != value.shape:
            fault = fault or f"{name} has shape {tuple(got.shape)}, expected {tuple(value.shape)}"
            continue
        if expected.exact:
            n_wrong = _misplaced(got, value, expected.ranking) if provider.kind == "ours" else 0
            if n_wrong:
                fault = fault or f"{name} differs in {n_wrong} places, expected none"
            continue
        if provider.kind == "ours":
            error, share = _distance(got, value, expected)
        else:
            error, share = _distance_of_others(got, value, expected, provider.slack)
        errors[name] = error
        worst = max(worst, share)
        slack = provider.slack
        if expected.norm:
            slack = max(1.0, min(slack, NORM_MOST / float(expected.bound)))
        if not share <= slack:
            kind = "in norm" if expected.norm else "at most"
            fault = fault or f"{name} is off by {error:.3g} {kind}, {share:.3g} times its bound"
    return fault, errors, worst


def _aligned(got: Tensor, expected: Expected) -> tuple[Tensor, Tensor]:
    got = got.detach()
    got = got if expected.of is None else expected.of(got)
    got = got if expected.rows is None else got[expected.rows]
    wide = torch.int64 if expected.exact else torch.float64
    return got.to(wide), expected.value.to(device=got.device, dtype=wide)


def _misplaced(got: Tensor, value: Tensor, ranking: Ranking | None) -> int:
    """How many places and candidates are wrong.

    A place, whose id stands in near places more often than near candidates have it, or in all more often than
    all; a candidate that is above the last place's by more than rounding, and is lost.
    """
    wrong = got != value
    if ranking is None or not bool(wrong.any()):
        return int(wrong.sum())
    rows, kappa = wrong.any(-1), got.shape[1]
    columns = (got, ranking.ids, ranking.values, ranking.rounding)
    got_nS, ids_nP, values_nP, rounding_nP = (column.to(got.device)[rows] for column in columns)
    slack_nSP = rounding_nP[:, :kappa, None] + rounding_nP[:, None]
    near_nSP = values_nP[:, None] >= values_nP[:, :kappa, None] - slack_nSP
    near_nSP &= values_nP[:, None] <= values_nP[:, :kappa, None] + slack_nSP
    met_nS = ((got_nS[:, :, None] == got_nS[:, None]) & near_nSP[:, :, :kappa]).sum(-1)
    is_nSP = got_nS[:, :, None] == ids_nP[:, None]
    known_nS = (is_nSP & near_nSP).sum(-1)
    spare_nS = (got_nS[:, :, None] == got_nS[:, None]).sum(-1) > is_nSP.sum(-1)
    due_nP = values_nP > (values_nP + rounding_nP)[:, kappa - 1 : kappa] + rounding_nP
    alike_nPP = (ids_nP[:, :, None] == ids_nP[:, None]) & due_nP[:, None]
    lost_nP = due_nP & (is_nSP.sum(1) < alike_nPP.sum(-1))
    return int(((met_nS > known_nS) | spare_nS).sum() + lost_nP.sum())


def _distance(got: Tensor, value: Tensor, expected: Expected) -> tuple[float, float]:
    if got.numel() == 0:
        return 0.0, 0.0
    if expected.norm:
        size = float(value.norm().clamp(min=1e-30))
        error_N = (got - value).reshape(got.shape[0] if got.ndim else 1, -1).norm(dim=1)
        error = float(error_N.norm()) / size
        if expected.besides is not None:
            error_N = (error_N - expected.besides.to(error_N.device)).clamp(min=0.0)
        counted = float(error_N.norm()) / size
        worst = float(error_N.max()) / size * math.sqrt(error_N.numel())
        return error, max(counted, worst / WORST_ROW) / float(expected.bound)
    difference = torch.where(got == value, 0.0, (got - value).abs())
    bound = expected.bound
    bound = bound.to(difference.device) if isinstance(bound, Tensor) else torch.full_like(difference, bound)
    share = torch.where(difference == 0, 0.0, difference / bound)
    # max() carries NaN, and NaN is at most nothing.
    return float(difference.max()), float(share.max())


def _distance_of_others(got: Tensor, value: Tensor, expected: Expected, slack: float) -> tuple[float, float]:
    """A few rows entry by entry, the others by their norm: where terms cancel no slack covers eager forms."""
    n_rows = got.shape[0] if got.ndim else 0
    if not isinstance(expected.bound, Tensor) or n_rows <= FEW_ROWS:
        return _distance(got, value, expected)
    few = torch.linspace(0, n_rows - 1, FEW_ROWS).round().long()
    bound = expected.bound.to(value.device)[few]
    error, share = _distance(got[few], value[few], replace(expected, bound=bound))
    of_norm = float((got - value).norm() / value.norm().clamp(min=1e-30)) / FEW_NORM
    return error, share if of_norm <= 1 else slack * of_norm  # NaN too


def ulp(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance between neighbours of dtype at value."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(value.abs().clamp(min=info.tiny))
    return torch.ldexp(torch.full_like(value, info.eps), exponent - 1)


def gradient_bound(gradient: Tensor, dtype: torch.dtype, scale: Tensor) -> Tensor:
    """Of |g - g64|: scale is w (p_v + sum q_v + |c_pg|), the size of the terms that g is made of."""
    return ULPS[dtype] * ulp(gradient, dtype) + CANCELLATION * scale


@contextmanager
def poisoned_memory(like: Tensor) -> Iterator[None]:
    """Inside, new memory holds what no result does, so that what is not written shows.

    On a GPU NaN, in the blocks that the allocator hands out next. On Linux's CPUs glibc fills what is
    allocated with one byte and what is freed with its complement: about -1.5 and 3.0 in every float type.
    """
    if like.is_cuda:
        blocks = [
            torch.full_like(like, float("nan")),
            torch.full((1 << 22,), float("nan"), device=like.device),
        ]
        del blocks
        yield
        return
    perturb = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)
    perturb(M_PERTURB, FREED_BYTE)
    try:
        yield
    finally:
        perturb(M_PERTURB, 0)
