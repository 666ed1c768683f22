"""Inputs and results of the operations, as frozen dataclasses. smopd.ops exports the public ones.

Shapes: N packed response tokens, V vocabulary, M teachers, S support entries (kappa).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

# Bits of LossStats.clipped_N. Each of the first three means that the surrogate has no gradient.
CLIP_LOW = 1  # the ratio is below 1 - clip_low and the advantage is negative
CLIP_HIGH = 2  # the ratio is above 1 + clip_high and the advantage is positive
CLIP_DUAL = 4  # the dual clip limits the surrogate
CLIP_LOG_RATIO = 8  # |log ratio| is clamped to LOG_RATIO_BOUND: surrogate and reverse term have no gradient
CLIP_REVERSE_LOW = 16  # the reverse-KL term raises the ratio to 1 - clip_low
CLIP_REVERSE_HIGH = 32  # the reverse-KL term lowers the ratio to 1 + clip_high

LOG_RATIO_BOUND = 20.0  # log pi - log pi_old is clamped to this size before exp, as in verl
TAIL_FLOOR = 2.0**-20  # ours: a smaller tail mass of the teachers counts as 0, as it may be a rounding error

REVERSE_KL_SURROGATES = ("paper", "ppo")

EQUAL_ULPS = 8  # rewards of a group that differ by at most this many ulps count as equal (our choice)
CONFLICT_FLOOR = 1e-8  # a smaller per-reward advantage counts as neither positive nor negative (GD2PO)
TOKEN_VAR_EPS = 1e-8  # added to the variance when whitening over tokens (verl's masked_whiten)


@dataclass(frozen=True)
class TopK:
    """The kappa most likely tokens of each row.

    Attributes:
        ids_NS: (N, S) int32, sorted by descending log-probability. Ties go to the lower id.
        logps_NS: (N, S) log-probabilities over the whole vocabulary, nats, fp32 (fp64 for fp64 logits).
        token_logp_N: (N,) log-probability of each given token, or None without token_ids_N.
    """

    ids_NS: Tensor
    logps_NS: Tensor
    token_logp_N: Tensor | None = None


@dataclass(frozen=True)
class Mixture:
    """A sparse mixture of teachers: Eq. 6, or Eq. 5 if equal ids are merged.

    Attributes:
        ids_NS: (N, S) int32, sorted by descending log-probability. An empty slot has id 0.
        logps_NS: (N, S) log-probabilities, fp32 (fp64 for fp64 inputs), including log alpha and not
            renormalised. An empty slot has -inf.
        mass_N: (N,) sum of exp(logps_NS) over the slots.
    """

    ids_NS: Tensor
    logps_NS: Tensor
    mass_N: Tensor


@dataclass(frozen=True, eq=False)
class AdvantageOptions:
    """Options of grpo_advantages, gdpo_advantages and gd2po_advantages. kind: "grpo", "gdpo" or "gd2po"."""

    kind: str
    weights_K: Tensor | None = None
    lengths_R: Tensor | None = None
    whiten: str | None = None
    snr_threshold: float | None = None
    norm_eps: float = 1e-6


@dataclass(frozen=True, kw_only=True, eq=False)
class LossTokens:
    """The per-token inputs of smopd_loss, on the device of the logits.

    A weight is the token's mask times its importance weight, divided by the global denominator. A token whose
    weights are all 0 adds exactly 0 to the loss and the gradient, even if its logits are NaN. The ids of such
    a token are ignored and may be -100.

    Attributes:
        token_ids_N: (N,) sampled tokens, int32 or int64 in [0, V).
        adv_N: (N,) advantages of the clipped surrogate.
        pg_weight_N: (N,) weight of the clipped surrogate.
        old_logp_N: (N,) log-probability under the behavior policy. With None, the ratio is 1.
        kl_weight_N: (N,) weight of the forward KL, before the factor opd_coef. Required with a target.
        ent_weight_N: (N,) weight of the entropy. Required if entropy_coef is not 0.
        target_ids_NS, target_logps_NS: (N, S) sparse target, such as the output of teacher_mixture.
        teacher_ids_NMS, teacher_logps_NMS, log_alpha: each teacher's top kappa, (N, M, S), and its log
            weight, (M,), (N, M) or broadcastable. They replace a target: the loss builds the mixture.
        reverse_adv_N: (N,) log q_mix(y) - log pi_old(y), the advantage of the sampled reverse KL (Eq. 17).
        reverse_weight_N: (N,) weight of the reverse term, before the factor opd_coef. None: kl_weight_N.
    """

    token_ids_N: Tensor
    adv_N: Tensor
    pg_weight_N: Tensor
    old_logp_N: Tensor | None = None
    kl_weight_N: Tensor | None = None
    ent_weight_N: Tensor | None = None
    target_ids_NS: Tensor | None = None
    target_logps_NS: Tensor | None = None
    teacher_ids_NMS: Tensor | None = None
    teacher_logps_NMS: Tensor | None = None
    log_alpha: Tensor | None = None
    reverse_adv_N: Tensor | None = None
    reverse_weight_N: Tensor | None = None

    def at(self, rows: slice | Tensor) -> LossTokens:
        """Return the tokens at `rows`. log_alpha is indexed only if it has one row per token."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.log_alpha is not None and self.log_alpha.shape[:-1] != self.token_ids_N.shape:
            del tensors["log_alpha"]
        return replace(self, **{name: value[rows] for name, value in tensors.items() if value is not None})


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """The constants of the loss. The recipes set the paper's values, which can differ from these defaults.

    Attributes:
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        dual_clip: above 1. If adv is negative, the surrogate is at most dual_clip * |adv|. None: no limit.
        opd_coef: lambda of Eq. 9, the factor of the forward KL and the reverse term.
        entropy_coef: factor of the weighted entropy, which the loss subtracts.
        kappa: number of the teachers' candidates to keep. Used only with LossTokens.teacher_*.
        merge: True merges equal ids before the cut to kappa (Eq. 5). False keeps repeats (Eq. 6).
        tail: whether student and target have a bucket for all tokens outside the target's support.
        temperature: temperature of the ratio and the entropy. Use that of the rollouts.
        kl_temperature: temperature of the student in the forward KL. Use that of the teachers.
        reverse_kl_surrogate: "paper" is -clip(ratio) adv (Eq. 17), "ppo" is -min(ratio adv, clip(ratio) adv).
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    opd_coef: float = 1.0
    entropy_coef: float = 0.0
    kappa: int = 16
    merge: bool = True
    tail: bool = True
    temperature: float = 1.0
    kl_temperature: float = 1.0
    reverse_kl_surrogate: str = "paper"

    def __post_init__(self) -> None:
        def check(name: str, holds: bool, expected: str) -> None:
            require("LossSettings", name, getattr(self, name), holds, expected)

        for name in ("clip_low", "clip_high", "opd_coef", "entropy_coef", "temperature", "kl_temperature"):
            check(name, is_number(getattr(self, name)), "a finite number")
        check("clip_low", 0.0 <= self.clip_low <= 1.0, "a number in [0, 1]")
        check("clip_high", self.clip_high >= 0.0, "a number of at least 0")
        check("dual_clip", self.dual_clip is None or self.dual_clip > 1.0, "None or a number above 1")
        check("temperature", self.temperature > 0.0, "a number above 0")
        check("kl_temperature", self.kl_temperature > 0.0, "a number above 0")
        check("kappa", is_int(self.kappa) and self.kappa >= 0, "an integer of at least 0")
        known = self.reverse_kl_surrogate in REVERSE_KL_SURROGATES
        check("reverse_kl_surrogate", known, f"one of {REVERSE_KL_SURROGATES}")


@dataclass(frozen=True, eq=False)
class TokenColumns:
    """The columns, (N,) each, that LossStats and TokenTerms share."""

    logp_N: Tensor
    entropy_N: Tensor
    kl_N: Tensor
    teacher_mass_N: Tensor
    student_mass_N: Tensor
    clipped_N: Tensor


@dataclass(frozen=True, eq=False)
class LossStats(TokenColumns):
    """Detached statistics that the loss computes in the same pass, in fp32 (fp64 for fp64 logits).

    All columns are 0 for a token whose weights are all 0.

    Attributes:
        logp_N: (N,) log-probability of the token at `temperature`.
        entropy_N: (N,) entropy of the student at `temperature`, in nats.
        kl_N: (N,) forward KL at kl_temperature, neither weighted nor clamped, or 0 without a target.
        teacher_mass_N: (N,) mass Q of the target, or 0 without a target.
        student_mass_N: (N,) the student's total probability of the target's distinct ids at kl_temperature.
        clipped_N: (N,) int8, a sum of CLIP_* bits.
        pg_loss, kl_loss, entropy, reverse_loss: 0-dim weighted sums of the terms, with
            loss = pg_loss + opd_coef * (kl_loss + reverse_loss) - entropy_coef * entropy.
    """

    pg_loss: Tensor
    kl_loss: Tensor
    entropy: Tensor
    reverse_loss: Tensor


@dataclass(frozen=True, eq=False)
class TokenTerms(TokenColumns):
    """Result of loss_rows: the columns of LossStats and two unweighted terms, (N,) each."""

    surrogate_N: Tensor
    reverse_N: Tensor


@dataclass(frozen=True, eq=False)
class SparseTarget:
    """The target of a forward KL: (N, S) ids and log-probabilities or, with log_alpha, (N, M, S) candidates.

    -inf marks an empty slot. Ids may repeat. log_alpha, kappa and merge are arguments of teacher_mixture.
    """

    ids: Tensor
    logps: Tensor
    log_alpha: Tensor | None = None
    kappa: int = 0
    merge: bool = False

    @property
    def n_pooled(self) -> int:
        """Number of candidates per row, or 0 without log_alpha."""
        return 0 if self.log_alpha is None else self.ids.shape[1] * self.ids.shape[2]

    @property
    def n_entries(self) -> int:
        """Number of target entries per row, after the cut to kappa."""
        return self.ids.shape[1] if self.log_alpha is None else min(self.n_pooled, self.kappa)


def loss_target(tokens: LossTokens, settings: LossSettings) -> SparseTarget | None:
    """Return the target of the forward KL, or None if the tokens have none."""
    if tokens.target_ids_NS is not None and tokens.target_logps_NS is not None:
        return SparseTarget(tokens.target_ids_NS, tokens.target_logps_NS)
    if tokens.teacher_ids_NMS is not None and tokens.teacher_logps_NMS is not None:
        teachers = (tokens.teacher_ids_NMS, tokens.teacher_logps_NMS, tokens.log_alpha)
        return SparseTarget(*teachers, settings.kappa, settings.merge)
    return None


def require(op: str, name: str, value: object, holds: bool, expected: str) -> None:
    if not holds:
        raise ValueError(f"{op}: {name} is {value!r}, expected {expected}")


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Return whether the value is a finite number. torch.compile cannot trace math.isfinite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute in: fp64 for fp64, fp32 for every smaller dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32
