"""smopd_loss from pieces of the vocabulary: the terms from the merged sums, then any tile's gradient.

From the sums over the whole vocabulary (head/sums.py) come the loss's terms; from those and the logits of
a tile (rows x piece) comes that tile's gradient, by the closed forms of reference_rows.rows_gradient.
Nothing wider than a tile is needed. A backend may have its own TileLoss, the two passes over a tile; what is
done with the sums between them is the same for all.

Shapes: N tokens, P a piece of the vocabulary, S support entries (kappa), C columns of sums,
K columns of what a gradient takes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields, replace
from typing import Protocol

import torch
from torch import Tensor

from smopd.kernels.head.shards import Shard
from smopd.kernels.head.sums import Level, Plan, make_plan, over_shards, places_in, scan, widened
from smopd.kernels.reference.loss import RowGradients, token_terms
from smopd.kernels.reference.rows import LOGP_FLOOR, Rows, Target, row_chunks, rows_gradient, support_terms
from smopd.kernels.types import LossSettings, LossTokens, TokenTerms


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


def gradient_(plan: Plan, merged: Merged, tile_NP: Tensor, row: int, column: int) -> None:
    """Replace a tile of logits by the loss's gradient in them: tokens row.., vocabulary column..."""
    ask = tile_NP.device.type == "cpu"  # elsewhere asking costs a synchronisation
    for start, stop in row_chunks(tile_NP):
        block_NP, rows = tile_NP[start:stop], slice(row + start, row + stop)
        grad_NP = None
        for softmax, pull in zip(merged.softmaxes, merged.pulls, strict=True):
            parts = [
                part if part is None else part[rows] for part in (pull.logp_N, pull.kl_N, pull.entropy_N)
            ]
            if any(part is not None for part in parts):
                tile_rows = _tile_rows(plan, merged, softmax, block_NP, rows, column, parts[2] is not None)
                share_NP = rows_gradient(tile_rows, *parts)
                grad_NP = share_NP if grad_NP is None else grad_NP.add_(share_NP)
        assert grad_NP is not None  # the first softmax always has a log-probability
        if not ask or bool(merged.idle_N[rows].any()):
            grad_NP.masked_fill_(merged.idle_N[rows, None], 0.0)
        block_NP.copy_(grad_NP[:, : block_NP.shape[1]])


def _tile_rows(
    plan: Plan,
    merged: Merged,
    softmax: Softmax,
    block_NP: Tensor,
    rows: slice,
    column: int,
    entropy_gradient: bool,
) -> Rows:
    """A block of a tile as reference_rows knows it, and a column for what the piece does not hold."""

    def cut(value: Tensor | None) -> Tensor | None:
        return None if value is None else value[rows]

    width, level, target = block_NP.shape[1], softmax.level, None
    logq_NP = widened(block_NP, level.temperature, 0.0)
    logq_NP.sub_(softmax.base_N[rows, None]).sub_(softmax.log_total_N[rows, None])
    logq_NP[:, width] = 0.0
    off_mass_N = None
    if level.kl and plan.target is not None and merged.q_NS is not None:
        target = plan.target.rows(rows)
        places_NS = places_in(target.ids_NS, column, width)[1]
        if softmax.off_logp_N is not None:
            logq_NP.scatter_(1, torch.where(target.live_N[:, None], places_NS, width), -torch.inf)
        target = replace(target, ids_NS=places_NS, q_NS=merged.q_NS[rows])
    if softmax.off_logp_N is None:
        dense_NP = logq_NP.exp() if entropy_gradient else logq_NP.exp_()
    else:
        off_logp_N = softmax.off_logp_N[rows]
        off_mass_N = off_logp_N.exp()
        off_logp_N1 = torch.where(off_logp_N == -torch.inf, 0.0, off_logp_N)[:, None]
        dense_NP = (logq_NP - off_logp_N1 if entropy_gradient else logq_NP.sub_(off_logp_N1)).exp_()
    if entropy_gradient:
        logq_NP.clamp_(min=LOGP_FLOOR)
    return Rows(
        temperature=level.temperature,
        logq_NV=logq_NP,
        dense_NV=dense_NP,
        off_mass_N=off_mass_N,
        token_ids_N1=places_in(plan.token_ids_N1[rows], column, width)[1],
        logp_N=softmax.logp_N[rows],
        entropy_N=cut(softmax.entropy_N),
        target=target,
        student_logps_NS=cut(softmax.student_logps_NS),
        tail_q_N=cut(merged.tail_q_N) if level.kl else None,
        kl_N=None,
        student_mass_N=None,
    )


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


class ReferenceTileLoss:
    def __init__(self, plan: Plan):
        self.plan = plan

    @staticmethod
    def plan_of(tokens: LossTokens, settings: LossSettings, logits_dtype: torch.dtype) -> Plan:
        return make_plan(tokens, settings, logits_dtype)

    def scan(self, sums_CN: Tensor, tile_NP: Tensor, row: int, column: int) -> None:
        scan(self.plan, sums_CN, tile_NP, row, column)

    def gradient_(self, merged: Merged, tile_NP: Tensor, row: int, column: int) -> None:
        gradient_(self.plan, merged, tile_NP, row, column)


def sharded_loss_rows(
    logits_NP: Tensor,
    tokens: LossTokens,
    settings: LossSettings,
    grad_NP: Tensor | None,
    *,
    shard: Shard,
    tile_loss: type[TileLoss] = ReferenceTileLoss,
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
