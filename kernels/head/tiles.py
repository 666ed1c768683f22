"""smopd_loss from tiles of logits (rows x a piece of the vocabulary), or from shards of a head.

What the objective needs of a row are sums over its vocabulary. They can be collected from tiles and from
ranks that hold a shard of the head each:

    peak, total, slope   max x,  sum exp(x - peak),  sum exp(x - peak) (x - peak),   x = logits / temperature
    token, support       the logits of the row's token and of its target's support, wherever they are

Two pieces' sums become one by shifting both to the larger peak. With the tail bucket the support is left out
of the sums, so that the student's mass off the support is summed directly; `finish` adds the support from its
own logits. From the sums over the whole vocabulary come the loss's terms; from those and the logits of a tile
comes that tile's gradient. Nothing wider than a tile is needed. The two passes over a tile are a backend's
(TileLoss); what is done with the sums between them is the same for all.

Shapes: N tokens, V vocabulary, P a piece of it, S support entries (kappa), C columns of sums, K columns of
what a gradient takes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Protocol

import torch
from torch import Tensor

from smopd.kernels.head.shards import Shard
from smopd.kernels.terms import LOGP_FLOOR, RowGradients, Target, support_terms, token_terms
from smopd.kernels.types import LossSettings, LossTokens, TokenTerms, compute_dtype, loss_target

SUMS = 3  # columns of one level: peak, total, slope


@dataclass(frozen=True)
class Level:
    """One softmax of the rows. off_support: the target's support is left out of its sums."""

    temperature: float
    off_support: bool
    entropy: bool
    kl: bool


@dataclass(frozen=True)
class Plan:
    """What is to be collected for these tokens. levels: one, or two where the KL has its own temperature.

    dtype: of the tokens' terms; sums_dtype: of what is collected, and of the target beside it.
    """

    tokens: LossTokens
    settings: LossSettings
    target: Target | None
    levels: tuple[Level, ...]
    token_ids_N1: Tensor
    dtype: torch.dtype
    sums_dtype: torch.dtype

    def empty_sums(self) -> Tensor:
        """(C, N): peak, total, slope of each level, the token's logit, the support's; of no logits yet.

        NaN stands for a logit that was not met, and stays if no piece has its id.
        """
        n_support = 0 if self.target is None else self.target.ids_NS.shape[1]
        picked = SUMS * len(self.levels)
        shape = (picked + 1 + n_support, self.token_ids_N1.shape[0])
        sums_CN = self.token_ids_N1.new_zeros(shape, dtype=self.sums_dtype)
        sums_CN[0:picked:SUMS] = -torch.inf
        sums_CN[picked:] = torch.nan
        return sums_CN

    def level_of(self, sums_CN: Tensor, index: int) -> Tensor:
        return sums_CN[SUMS * index : SUMS * (index + 1)]

    def picked_of(self, sums_CN: Tensor) -> tuple[Tensor, Tensor]:
        """The logits of the tokens (N, 1) and of the support (N, S)."""
        first = SUMS * len(self.levels)
        return sums_CN[first, :, None], sums_CN[first + 1 :].T


def make_plan(
    tokens: LossTokens,
    settings: LossSettings,
    logits_dtype: torch.dtype,
    target_of: Callable[..., Target],
    sums_dtype: torch.dtype | None = None,
) -> Plan:
    """target_of: the backend's, which makes a target ready. sums_dtype: None: the logits' compute dtype."""
    dtype = compute_dtype(logits_dtype)
    sums_dtype = sums_dtype or dtype
    given = loss_target(tokens, settings)
    target = None if given is None else target_of(given, sums_dtype, tail=settings.tail)
    tail = target is not None and settings.tail
    if target is None or settings.temperature == settings.kl_temperature:
        levels: tuple[Level, ...] = (Level(settings.temperature, tail, entropy=True, kl=target is not None),)
    else:
        levels = (
            Level(settings.temperature, False, entropy=True, kl=False),
            Level(settings.kl_temperature, tail, entropy=False, kl=True),
        )
    # A copy: recompute reads it in backward, when the caller may have changed his.
    token_ids_N1 = tokens.token_ids_N[:, None].to(torch.int64, copy=True)
    return Plan(tokens, settings, target, levels, token_ids_N1, dtype, sums_dtype)


def places_in(ids: Tensor, column: int, width: int) -> tuple[Tensor, Tensor]:
    """Which ids the piece [column, column + width) holds, and their places in it; width for the others."""
    places = ids - column
    inside = (places >= 0) & (places < width)
    return inside, torch.where(inside, places, width)


def merge_(into_CN: Tensor, other: Tensor | tuple[Tensor, Tensor, Tensor]) -> None:
    """peak, total, slope of two disjoint sets of logits -> of their union."""
    peak_N = torch.maximum(into_CN[0], other[0])
    merged = []
    for part_peak_N, total_N, slope_N in (into_CN, other):
        shift_N = torch.where(part_peak_N == -torch.inf, 0.0, part_peak_N - peak_N)
        scale_N = shift_N.exp()
        # A shift below the floor scales to 0, and -inf * 0 would be NaN.
        merged.append((total_N * scale_N, (slope_N + shift_N.clamp(min=LOGP_FLOOR) * total_N) * scale_N))
    into_CN[0] = peak_N
    into_CN[1] = merged[0][0] + merged[1][0]
    into_CN[2] = merged[0][1] + merged[1][1]


def over_shards(plan: Plan, sums_CN: Tensor, shard: Shard) -> Tensor:
    """The sums over all ranks, the same bits on each of them."""
    if shard.group is None:
        return sums_CN
    first_CN, *others = shard.gather(sums_CN)
    merged_CN, start = first_CN.clone(), shard.sizes[0]
    merged = plan.picked_of(merged_CN)
    ids = (plan.token_ids_N1, plan.token_ids_N1[:, :0] if plan.target is None else plan.target.ids_NS)
    for other_CN, size in zip(others, shard.sizes[1:], strict=True):
        for index in range(len(plan.levels)):
            merge_(plan.level_of(merged_CN, index), plan.level_of(other_CN, index))
        for into, got, wanted in zip(merged, plan.picked_of(other_CN), ids, strict=True):
            into.copy_(torch.where(places_in(wanted, start, size)[0], got, into))
        start += size
    return merged_CN


@dataclass(frozen=True)
class Softmax:
    """A level's rows: log p_v = x_v - base - log_total. off_logp_N: of all that is off the support.

    peak_N, log_stream_N: of what is in the level's sums, the log of its total.
    """

    level: Level
    base_N: Tensor
    log_total_N: Tensor
    peak_N: Tensor
    log_stream_N: Tensor
    logp_N: Tensor
    entropy_N: Tensor | None
    student_logps_NS: Tensor | None
    off_logp_N: Tensor | None


@dataclass(frozen=True)
class Merged:
    """The rows' statistics over the whole vocabulary, and what pulls at their logits.

    target: where there is a KL. tail_q_N: the target's mass off the support. idle_N: nothing pulls.
    """

    terms: TokenTerms
    softmaxes: tuple[Softmax, ...]
    pulls: tuple[RowGradients, ...]
    target: Target | None
    tail_q_N: Tensor | None
    idle_N: Tensor

    @functools.cached_property
    def q_NS(self) -> Tensor | None:
        """The target's masses, a repeated id's in its first slot alone."""
        return None if self.target is None else _joined(self.target)

    @functools.cached_property
    def columns_KN(self) -> Tensor:
        """What csrc/cpu/loss_tiles.cpp reads of a row: four columns of each softmax, then its gradients."""
        first, last = self.pulls[0], self.pulls[-1]
        columns: list[Tensor | None] = []
        for level in self.softmaxes:
            columns += [level.base_N, level.log_total_N, level.peak_N, level.log_stream_N]
        columns += [first.logp_N, last.kl_N, first.entropy_N, self.softmaxes[0].entropy_N]
        columns += [None if self.target is None else self.target.mass_N, self.tail_q_N, self.idle_N]
        zero_N = torch.zeros_like(self.softmaxes[0].logp_N)
        return torch.stack([zero_N if column is None else column.to(zero_N.dtype) for column in columns])


def _softmax(plan: Plan, sums_CN: Tensor, index: int) -> Softmax:
    level, target = plan.levels[index], plan.target
    peak_N, total_N, slope_N = plan.level_of(sums_CN, index)
    token_N1, support_NS = plan.picked_of(sums_CN)
    scaled_NS = support_NS / level.temperature
    top_N, all_N = peak_N, total_N
    if level.off_support and target is not None:
        inside_NS = torch.where(target.first_NS, scaled_NS, -torch.inf)
        top_N = torch.cat((peak_N[:, None], inside_NS), 1).amax(1)
    base_N = torch.where(top_N == -torch.inf, 0.0, top_N)
    student_logps_NS = off_logp_N = entropy_N = None
    if level.off_support and target is not None:
        all_N = total_N * (peak_N - base_N).exp() + (inside_NS - base_N[:, None]).exp().sum(1)
    log_total_N = all_N.log()
    logp_N = token_N1[:, 0] / level.temperature - base_N - log_total_N
    if level.kl:
        student_logps_NS = scaled_NS - base_N[:, None] - log_total_N[:, None]
    if level.off_support:
        off_logp_N = peak_N - base_N + total_N.log() - log_total_N
    if level.entropy and off_logp_N is None:
        entropy_N = log_total_N - slope_N / total_N
    elif level.entropy and off_logp_N is not None and student_logps_NS is not None and target is not None:
        off_mean_N = slope_N / total_N + (peak_N - base_N - log_total_N)  # of log p_v off the support
        inside_NS = student_logps_NS.exp() * student_logps_NS.clamp(min=LOGP_FLOOR)
        entropy_N = -torch.where(target.first_NS, inside_NS, 0.0).sum(-1)
        all_inside_N = (total_N == 0) & (log_total_N > -torch.inf)
        entropy_N = entropy_N - torch.where(all_inside_N, 0.0, off_logp_N.exp() * off_mean_N)
    return Softmax(
        level=level,
        base_N=base_N,
        log_total_N=log_total_N,
        peak_N=peak_N,
        log_stream_N=total_N.log(),
        logp_N=logp_N,
        entropy_N=entropy_N,
        student_logps_NS=student_logps_NS,
        off_logp_N=off_logp_N,
    )


def finish(plan: Plan, sums_CN: Tensor) -> Merged:
    """sums_CN: over the whole vocabulary."""
    target = plan.target
    softmaxes = tuple(_softmax(plan, sums_CN, index) for index in range(len(plan.levels)))
    first, last = softmaxes[0], softmaxes[-1]
    kl_N = student_mass_N = tail_q_N = mass_N = None
    if target is not None and last.student_logps_NS is not None:
        kl_N, student_mass_N, tail_q_N = support_terms(target, last.student_logps_NS, last.off_logp_N)
        mass_N = target.mass_N
    statistics = (first.logp_N, first.entropy_N, kl_N, mass_N, student_mass_N)
    terms, pull, idle_N = token_terms(plan.tokens, plan.settings, *statistics)
    pulls: tuple[RowGradients, ...] = (pull,)
    if len(softmaxes) == 2:
        pulls = (replace(pull, kl_N=None), RowGradients(None, pull.kl_N, None))
    return Merged(_in_dtype(terms, plan.dtype), softmaxes, pulls, target, tail_q_N, idle_N)


def _in_dtype(terms: TokenTerms, dtype: torch.dtype) -> TokenTerms:
    columns = {field.name: getattr(terms, field.name) for field in fields(TokenTerms)}
    return TokenTerms(**{name: c.to(dtype) if c.is_floating_point() else c for name, c in columns.items()})


def _joined(target: Target) -> Tensor:
    """q with a repeated id's mass in its first slot: a scatter adds it once, in whatever order it runs."""
    q_NS = torch.zeros_like(target.q_NS)
    for slot in range(target.ids_NS.shape[1]):
        same_NS = target.ids_NS == target.ids_NS[:, slot, None]
        q_NS += torch.where(same_NS & target.first_NS, target.q_NS[:, slot, None], 0.0)
    return q_NS


def scaled_pulls(merged: Merged, factor: Tensor) -> Merged:
    """For an upstream gradient (0-dim) of the loss."""

    def scaled(part: Tensor | None) -> Tensor | None:
        return None if part is None else part * factor.to(part.dtype)

    pulls = [(scaled(pull.logp_N), scaled(pull.kl_N), scaled(pull.entropy_N)) for pull in merged.pulls]
    return replace(merged, pulls=tuple(RowGradients(*pull) for pull in pulls))


class TileLoss(Protocol):
    """The passes over a plan's tiles of logits: tokens row.., vocabulary column..., as scan and gradient_."""

    def __init__(self, plan: Plan): ...

    @staticmethod
    def plan_of(tokens: LossTokens, settings: LossSettings, logits_dtype: torch.dtype) -> Plan: ...

    def scan(self, sums_CN: Tensor, tile_NP: Tensor, row: int, column: int) -> None: ...

    def gradient_(self, merged: Merged, tile_NP: Tensor, row: int, column: int) -> None: ...


def sharded_loss_rows(
    logits_NP: Tensor,
    tokens: LossTokens,
    settings: LossSettings,
    grad_NP: Tensor | None,
    *,
    shard: Shard,
    tile_loss: type[TileLoss],
) -> TokenTerms:
    """loss_rows of the backend protocol on a shard's logits, with one all-gather of (C, N) numbers."""
    plan = tile_loss.plan_of(tokens, settings, logits_NP.dtype)
    sums_CN, passes = plan.empty_sums(), tile_loss(plan)
    passes.scan(sums_CN, logits_NP, 0, shard.start)
    merged = finish(plan, over_shards(plan, sums_CN, shard))
    if grad_NP is not None:
        if grad_NP is not logits_NP:
            grad_NP.copy_(logits_NP)
        passes.gradient_(merged, grad_NP, 0, shard.start)
    return merged.terms
