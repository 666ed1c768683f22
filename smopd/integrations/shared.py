"""Shared by the integrations: checks of host and teachers, and a KL with the masses that hosts log.

Shapes: N tokens, V vocabulary, S support entries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import torch
from packaging.version import Version
from torch import Tensor

from smopd.ops import topk_forward_kl, topk_logprobs

WEIGHT_SUM_TOLERANCE = 1e-6  # ours: decimal fractions such as thirds written with seven digits pass


def require_host(package: str, first: str, before: str) -> str:
    """Return the installed version; raise ImportError unless first <= version < before."""
    known = f"{package}>={first},<{before}"
    try:
        installed = version(package)
    except PackageNotFoundError:
        raise ImportError(
            f"smopd.integrations needs {package}, which is not installed: pip install '{known}'"
        ) from None
    if not Version(first) <= Version(installed) < Version(f"{before}.dev0"):
        raise ImportError(
            f"smopd.integrations supports {known}; {package} {installed} is installed. "
            f"pip install '{known}', or an smopd that supports {installed}"
        )
    return installed


def require_same_tokens(
    own: Mapping[str, int], other: Mapping[str, int], teacher: str, *, more: bool = False
) -> None:
    """Raise ValueError if a token has another id for the teacher.

    more: allow further tokens of the teacher above all ids of the student.
    """
    first = 1 + max(own.values()) if more else math.inf
    compared = own.keys() | {token for token, i in other.items() if i < first}
    differing = sorted(token for token in compared if other.get(token) != own.get(token))
    if differing:
        token = differing[0]
        raise ValueError(
            f"teacher {teacher} has another tokenizer than the student: {token!r} is token "
            f"{other.get(token)} of the teacher and {own.get(token)} of the student"
        )


def require_vocabulary(teachers: str, ids: Tensor, vocab_size: int) -> None:
    """Raise ValueError if an id is outside [0, vocab_size); costs one host synchronisation."""
    if ids.numel() == 0:
        return
    low, high = torch.stack(torch.aminmax(ids)).tolist()
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"{teachers} has tokens {low} to {high}, expected ids in [0, {vocab_size}), the columns of the "
            "student's logits: the teachers need the student's vocabulary, and the logits must not be sharded"
        )


def log_weights(weights: Sequence[float]) -> Tensor:
    """Return log alpha of the mixture (Eq. 5), (M,) fp32; a weight of 0 (-inf) disables its teacher."""
    alpha = [float(weight) for weight in weights]
    if not all(weight >= 0.0 for weight in alpha) or abs(math.fsum(alpha) - 1.0) > WEIGHT_SUM_TOLERANCE:
        raise ValueError(f"teacher_weights is {alpha}, expected numbers of at least 0 that sum to 1")
    return torch.tensor(alpha, dtype=torch.float64).log().float()


class SupportKL(NamedTuple):
    """A forward KL and the metrics that hosts log, (N,) each; only kl_N has a gradient.

    kl_N: nats, neither clamped nor renormalised.
    student_mass_N: the student's probability of the support, counting each id once.
    teacher_mass_N: the target's mass Q.
    """

    kl_N: Tensor
    student_mass_N: Tensor
    teacher_mass_N: Tensor


def support_forward_kl(
    logits_NV: Tensor, ids_NS: Tensor, logps_NS: Tensor, *, tail: bool, temperature: float = 1.0
) -> SupportKL:
    """Compute `topk_forward_kl` and its masses in one pass over the vocabulary; -inf marks an empty slot."""
    require_vocabulary("the teachers' top tokens", ids_NS, logits_NV.shape[1])
    logp_N, kl_N = topk_forward_kl(
        logits_NV, ids_NS[:, 0], ids_NS, logps_NS, tail=tail, temperature=temperature
    )
    repeated_NS = (ids_NS[:, :, None] == ids_NS[:, None]).tril(-1).any(-1)
    counted_NS = torch.isfinite(logps_NS) & ~repeated_NS
    student_NS = _support_logps(logits_NV, ids_NS, logp_N, temperature).exp()
    return SupportKL(kl_N, (student_NS * counted_NS).sum(-1), logps_NS.exp().sum(-1))


def floored_forward_kl(
    logits_NV: Tensor, ids_NS: Tensor, logps_NS: Tensor, floor: float | None
) -> tuple[SupportKL, Tensor, Tensor]:
    """Compute verl's truncated KL: log-probabilities below the floor become the floor, without gradient.

        kl_n = sum_s q_s (log q_s - max(log p(v_s), floor)), q and log q from max(log q, floor)

    Args:
        ids_NS, logps_NS: one teacher's top S, each id once.
        floor: nats, or None.
    Returns:
        The KL and the masses before the floor; overlap_N, how many of the ids are among the student's own top
        S; advantage_N, the mean of the summand's negative over those.
    """
    require_vocabulary("the teacher's top tokens", ids_NS, logits_NV.shape[1])
    own = topk_logprobs(logits_NV.detach(), ids_NS.shape[1], token_ids_N=ids_NS[:, 0])
    assert own.token_logp_N is not None
    student_NS = _support_logps(logits_NV, ids_NS, own.token_logp_N, 1.0)
    masses = (student_NS.exp().sum(-1), logps_NS.exp().sum(-1))
    floored_NS = torch.zeros_like(ids_NS, dtype=torch.bool)
    if floor is not None:
        floored_NS = student_NS < floor
        student_NS, logps_NS = student_NS.clamp_min(floor), logps_NS.clamp_min(floor)
    _, kl_N = topk_forward_kl(logits_NV, ids_NS[:, 0], ids_NS, logps_NS.masked_fill(floored_NS, -torch.inf))
    term_NS = logps_NS.exp() * (logps_NS - student_NS)
    shared_NS = (ids_NS[:, :, None] == own.ids_NS[:, None]).any(-1)
    overlap_N = shared_NS.sum(-1)
    advantage_N = -(term_NS * shared_NS).sum(-1) / overlap_N.clamp_min(1)
    return SupportKL(kl_N + (term_NS * floored_NS).sum(-1), *masses), overlap_N, advantage_N


def _support_logps(logits_NV: Tensor, ids_NS: Tensor, logp_N: Tensor, temperature: float) -> Tensor:
    """Return the student's log-probabilities (N, S) of a support from that of its first entry; detached."""
    values_NS = logits_NV.detach().gather(1, ids_NS.long()).float() / temperature
    return values_NS - values_NS[:, :1] + logp_N.detach()[:, None]
