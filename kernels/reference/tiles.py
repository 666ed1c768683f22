"""The loss on tiles of logits in plain PyTorch: the two passes over a tile (head.tiles.TileLoss).

Each works on blocks of a tile's rows, widened. The gradient is the closed form of reference/rows.py, on a
tile with one more column, for what the piece does not hold.

Shapes: N tokens, P a piece of the vocabulary, S support entries (kappa), C columns of sums.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from smopd.kernels.head.tiles import Merged, Plan, Softmax, make_plan, merge_, places_in
from smopd.kernels.reference.rows import Rows, row_chunks, rows_gradient
from smopd.kernels.reference.topk import target_of
from smopd.kernels.terms import LOGP_FLOOR
from smopd.kernels.types import LossSettings, LossTokens, compute_dtype


class TileLoss:
    def __init__(self, plan: Plan):
        self.plan = plan

    @staticmethod
    def plan_of(tokens: LossTokens, settings: LossSettings, logits_dtype: torch.dtype) -> Plan:
        return make_plan(tokens, settings, logits_dtype, target_of)

    def scan(self, sums_CN: Tensor, tile_NP: Tensor, row: int, column: int) -> None:
        """Add a tile of logits to the sums: tokens row.., vocabulary column... Every logit comes once."""
        plan, width = self.plan, tile_NP.shape[1]
        for start, stop in row_chunks(tile_NP):
            block_NP, rows = tile_NP[start:stop], slice(row + start, row + stop)
            token_N1, support_NS = plan.picked_of(sums_CN[:, rows])
            _pick_(token_N1, plan.token_ids_N1[rows], block_NP, column)
            hole_NS = None
            if plan.target is not None:
                ids_NS = plan.target.ids_NS[rows]
                _pick_(support_NS, ids_NS, block_NP, column)
                places_NS = places_in(ids_NS, column, width)[1]
                hole_NS = torch.where(plan.target.live_N[rows, None], places_NS, width)
            for index, level in enumerate(plan.levels):
                wide_NP = _widened(block_NP, level.temperature, -torch.inf)
                if level.off_support and hole_NS is not None:
                    wide_NP.scatter_(1, hole_NS, -torch.inf)
                merge_(plan.level_of(sums_CN[:, rows], index), _sums(wide_NP, level.entropy))

    def gradient_(self, merged: Merged, tile_NP: Tensor, row: int, column: int) -> None:
        """Replace a tile of logits by the loss's gradient in them: tokens row.., vocabulary column..."""
        ask = tile_NP.device.type == "cpu"  # elsewhere asking costs a synchronisation
        for start, stop in row_chunks(tile_NP):
            block_NP, rows = tile_NP[start:stop], slice(row + start, row + stop)
            grad_NP = None
            for softmax, pull in zip(merged.softmaxes, merged.pulls, strict=True):
                pulls = (pull.logp_N, pull.kl_N, pull.entropy_N)
                parts = [None if part is None else part[rows] for part in pulls]
                if any(part is not None for part in parts):
                    curved = parts[2] is not None
                    tile_rows = _tile_rows(self.plan, merged, softmax, block_NP, rows, column, curved)
                    share_NP = rows_gradient(tile_rows, *parts)
                    grad_NP = share_NP if grad_NP is None else grad_NP.add_(share_NP)
            assert grad_NP is not None  # the first softmax always has a log-probability
            if not ask or bool(merged.idle_N[rows].any()):
                grad_NP.masked_fill_(merged.idle_N[rows, None], 0.0)
            block_NP.copy_(grad_NP[:, : block_NP.shape[1]])


def _widened(block_NP: Tensor, temperature: float, spare: float) -> Tensor:
    """(N, P + 1): the logits over the temperature, and a column for what is written beside the piece."""
    n_rows, width = block_NP.shape
    wide_NP = block_NP.new_empty(n_rows, width + 1, dtype=compute_dtype(block_NP.dtype))
    wide_NP[:, width] = spare
    wide_NP[:, :width] = block_NP
    return wide_NP if temperature == 1.0 else wide_NP.div_(temperature)


def _pick_(had_NS: Tensor, ids_NS: Tensor, block_NP: Tensor, column: int) -> None:
    """The logits of those ids that the block holds."""
    width = block_NP.shape[1]
    inside_NS, places_NS = places_in(ids_NS, column, width)
    got_NS = block_NP.gather(1, places_NS.clamp(max=width - 1)).to(had_NS.dtype)
    had_NS.copy_(torch.where(inside_NS, got_NS, had_NS))


def _sums(wide_NP: Tensor, entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """peak, total, slope (0 unless asked). Consumes its argument."""
    peak_N = wide_NP.amax(1)
    wide_NP.sub_(torch.where(peak_N == -torch.inf, 0.0, peak_N)[:, None])
    if not entropy:
        total_N = wide_NP.exp_().sum(1)
        return peak_N, total_N, torch.zeros_like(total_N)
    mass_NP = wide_NP.exp()
    total_N = mass_NP.sum(1)
    return peak_N, total_N, mass_NP.mul_(wide_NP.clamp_(min=LOGP_FLOOR)).sum(1)


def _tile_rows(
    plan: Plan,
    merged: Merged,
    softmax: Softmax,
    block_NP: Tensor,
    rows: slice,
    column: int,
    entropy_gradient: bool,
) -> Rows:
    """A block of a tile as rows_gradient knows it, and a column for what the piece does not hold."""

    def cut(value: Tensor | None) -> Tensor | None:
        return None if value is None else value[rows]

    width, level, target = block_NP.shape[1], softmax.level, None
    logq_NP = _widened(block_NP, level.temperature, 0.0)
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
