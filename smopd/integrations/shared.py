"""Code that the integrations share: checks of the host and its teachers, and advantages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from smopd.advantages import ESTIMATORS

WEIGHT_SUM_TOLERANCE = 1e-6  # ours: three weights of 0.3333333 pass


def require_host(package: str, first: str, before: str) -> str:
    """Return the installed version of `package`. Raise ImportError unless first <= version < before."""
    known = f"{package}>={first},<{before}"
    try:
        installed = version(package)
    except PackageNotFoundError:
        raise ImportError(f"smopd needs {package}, which is not installed: pip install '{known}'") from None
    if not Version(first) <= Version(installed) < Version(f"{before}.dev0"):
        text = f"{package} {installed} is installed. pip install '{known}', or another version of smopd"
        raise ImportError(f"smopd.integrations supports {known}; {text}")
    return installed


def require_same_tokens(
    own: Mapping[str, int], other: Mapping[str, int], teacher: str, *, more: bool = False
) -> None:
    """Raise ValueError unless student (`own`) and teacher (`other`) give each token the same id.

    more: the teacher may also have tokens with higher ids.
    """
    first = 1 + max(own.values()) if more else math.inf
    compared = own.keys() | {token for token, i in other.items() if i < first}
    differing = sorted(token for token in compared if other.get(token) != own.get(token))
    if differing:
        token = differing[0]
        ids = f"token {other.get(token)} of the teacher and {own.get(token)} of the student"
        raise ValueError(f"teacher {teacher} has another tokenizer than the student: {token!r} is {ids}")


def log_weights(weights: Sequence[float]) -> Tensor:
    """Return the mixture's log alpha (Eq. 5), (M,) fp32. A weight of 0 is -inf and disables its teacher."""
    alpha = [float(weight) for weight in weights]
    if not all(weight >= 0.0 for weight in alpha) or abs(math.fsum(alpha) - 1.0) > WEIGHT_SUM_TOLERANCE:
        raise ValueError(f"teacher_weights is {alpha}, expected numbers of at least 0 that sum to 1")
    return torch.tensor(alpha, dtype=torch.float64).log().float()


def batch_advantages(
    name: str,
    rewards_RK: Tensor,
    group_R: Tensor,
    weights_K: Tensor,
    lengths_R: Tensor,
    whiten: str | None,
    snr_threshold: float | None = None,
) -> Tensor:
    """Return the advantages of a whole batch, (R,), by an estimator of smopd/advantages.py."""
    settings: Any = SimpleNamespace(whiten=whiten, snr_threshold=snr_threshold)
    options = {"weights_K": weights_K, "low_K": torch.full_like(weights_K, torch.nan), "lengths_R": lengths_R}
    return ESTIMATORS[name](rewards_RK, group_R, **options, settings=settings, process_group=None)[0]
