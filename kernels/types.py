"""Inputs and results of the operations: frozen dataclasses of tensors and numbers, exported by smopd.ops.

Shapes: N packed response tokens, V vocabulary, M teachers, S support entries (kappa).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

# Bits of LossStats.clipped_N.
CLIP_LOW = 1  # ratio below 1 - clip_low and a negative advantage: no gradient
CLIP_HIGH = 2  # ratio above 1 + clip_high and a positive advantage: no gradient
CLIP_DUAL = 4  # the dual clip is active: no gradient
CLIP_LOG_RATIO = 8  # |log ratio| above LOG_RATIO_BOUND: clamped, no gradient through the ratio
CLIP_REVERSE_LOW = 16  # the ratio of the reverse-KL term is clipped from below
CLIP_REVERSE_HIGH = 32  # the ratio of the reverse-KL term is clipped from above

LOG_RATIO_BOUND = 20.0  # clamp of log pi - log pi_old before exp (as verl does)
TAIL_FLOOR = 2.0**-20  # a smaller teacher mass outside the support counts as 0 (ours): it may be rounding

REVERSE_KL_SURROGATES = ("paper", "ppo")

EQUAL_ULPS = 8  # rewards of a group that differ by at most this many ulps count as equal (our choice)
CONFLICT_FLOOR = 1e-8  # a smaller per-reward advantage counts as neither positive nor negative (GD2PO)
TOKEN_VAR_EPS = 1e-8  # added to the variance when whitening over tokens (verl's masked_whiten)


@dataclass(frozen=True)
class TopK:
    """The kappa most likely tokens of each row.

    Attributes:
        ids_NS: (N, S) int32, by descending log-probability; ties go to the lower id.
        logps_NS: (N, S) fp32 (fp64 for fp64 logits), nats, normalised over the whole vocabulary.
        token_logp_N: (N,) log-probability of the given tokens; None without tokens.
    """

    ids_NS: Tensor
    logps_NS: Tensor
    token_logp_N: Tensor | None = None


@dataclass(frozen=True)
class Mixture:
    """A sparse mixture of teachers (Eq. 6; Eq. 5 if merged).

    Attributes:
        ids_NS: (N, S) int32, by descending log-probability; id 0 in an empty slot.
        logps_NS: (N, S) fp32 (fp64 for fp64 inputs), -inf in an empty slot. Includes log alpha; not
            renormalised.
        mass_N: (N,) sum of exp(logps_NS).
    """

    ids_NS: Tensor
    logps_NS: Tensor
    mass_N: Tensor


@dataclass(frozen=True, eq=False)
class AdvantageOptions:
    """Options of grpo_, gdpo_ and gd2po_advantages. kind: "grpo", "gdpo" or "gd2po"."""

    kind: str
    weights_K: Tensor | None = None
    lengths_R: Tensor | None = None
    whiten: str | None = None
    snr_threshold: float | None = None
    norm_eps: float = 1e-6


@dataclass(frozen=True, kw_only=True, eq=False)
class LossTokens:
    """The per-token inputs of smopd_loss, on the device of the logits.

    A weight is mask * importance weight / global denominator. A token whose weights are all 0 adds exactly 0
    to the loss and the gradient, even if its logits are NaN. Its ids are not read and may be -100.

    Attributes:
        token_ids_N: (N,) int32 or int64 in [0, V), the sampled tokens.
        adv_N: (N,) advantages of the clipped surrogate.
        pg_weight_N: (N,) weight of the clipped surrogate.
        old_logp_N: (N,) log-probability under the behavior policy. None: the ratio is 1.
        kl_weight_N: (N,) weight of the forward KL, without opd_coef. Required with a target.
        ent_weight_N: (N,) weight of the entropy. Required if entropy_coef is not 0.
        target_ids_NS, target_logps_NS: (N, S) sparse target, such as the output of teacher_mixture.
        teacher_ids_NMS, teacher_logps_NMS, log_alpha: (N, M, S) top-kappa of each teacher and its log weight
            ((M,), (N, M) or broadcastable). Given instead of a target; the loss builds the mixture.
        reverse_adv_N: (N,) log q_mix(y) - log pi_old(y), the advantage of the sampled reverse KL (Eq. 17).
        reverse_weight_N: (N,) weight of the reverse term, without opd_coef. None: kl_weight_N.
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
        """Return the tokens at these rows. log_alpha is indexed only if it has a row per token."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.log_alpha is not None and self.log_alpha.shape[:-1] != self.token_ids_N.shape:
            del tensors["log_alpha"]
        return replace(self, **{name: value[rows] for name, value in tensors.items() if value is not None})


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """The constants of the loss. The recipes hold the paper's values; these are the library's defaults.

    Attributes:
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        dual_clip: c above 1, which limits the surrogate of a negative advantage to c * |adv|. None: off.
        opd_coef: lambda of Eq. 9; multiplies the forward KL and the reverse term.
        entropy_coef: multiplies the weighted entropy, which the loss subtracts.
        kappa: how many of the teachers' candidates are kept; used only with LossTokens.teacher_*.
        merge: merge equal ids of the teachers by logsumexp before the cut (Eq. 5); else pool them (Eq. 6).
        tail: add a bucket for the tokens outside the target's support, in student and target.
        temperature: of the ratio and the entropy; use the temperature of the rollouts.
        kl_temperature: of the student in the forward KL; use the temperature of the teachers.
        reverse_kl_surrogate: "paper": -clip(ratio) adv (Eq. 17); "ppo": -min(ratio adv, clip(ratio) adv).
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
    """Columns that LossStats and TokenTerms share, (N,) each."""

    logp_N: Tensor
    entropy_N: Tensor
    kl_N: Tensor
    teacher_mass_N: Tensor
    student_mass_N: Tensor
    clipped_N: Tensor


@dataclass(frozen=True, eq=False)
class LossStats(TokenColumns):
    """Statistics of the loss, from the same pass. Detached; fp32 (fp64 for fp64 logits).

    Columns are 0 for a token whose weights are all 0.

    Attributes:
        logp_N: (N,) log-probability of the token at `temperature`.
        entropy_N: (N,) entropy of the student at `temperature`, nats.
        kl_N: (N,) forward KL at kl_temperature, unweighted and unclamped; 0 without a target.
        teacher_mass_N: (N,) mass Q of the target; 0 without a target.
        student_mass_N: (N,) the student's mass at kl_temperature on the target's ids, each counted once.
        clipped_N: (N,) int8, a sum of CLIP_* bits.
        pg_loss, kl_loss, entropy, reverse_loss: 0-dim weighted sums of the terms;
            loss = pg_loss + opd_coef * (kl_loss + reverse_loss) - entropy_coef * entropy.
    """

    pg_loss: Tensor
    kl_loss: Tensor
    entropy: Tensor
    reverse_loss: Tensor


@dataclass(frozen=True, eq=False)
class TokenTerms(TokenColumns):
    """Result of loss_rows, (N,) each: the columns of LossStats, and two more unweighted terms."""

    surrogate_N: Tensor
    reverse_N: Tensor


@dataclass(frozen=True, eq=False)
class SparseTarget:
    """The target of a forward KL: (N, S) ids and log-probabilities or, with log_alpha, (N, M, S) candidates.

    -inf marks an empty slot; ids may repeat. log_alpha, kappa and merge are arguments of teacher_mixture.
    """

    ids: Tensor
    logps: Tensor
    log_alpha: Tensor | None = None
    kappa: int = 0
    merge: bool = False

    @property
    def n_pooled(self) -> int:
        """Number of candidates per row; 0 without log_alpha."""
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
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute in: fp64 for fp64, fp32 for every smaller dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32
