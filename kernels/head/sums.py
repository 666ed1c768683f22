"""What the objective needs of a row's logits, summed a piece of the vocabulary at a time.

A row's statistics are sums over its vocabulary. They can be collected from tiles (rows x piece) and from
ranks that hold a shard of the head each:

    peak, total, slope   max x,  sum exp(x - peak),  sum exp(x - peak) (x - peak),   x = logits / temperature
    token, support       the logits of the row's token and of its target's support, wherever they are

Two pieces' sums become one by shifting both to the larger peak. With the tail bucket the support is left
out of the sums, so that the student's mass off the support is summed directly; head/tiles.py adds the
support from its own logits.

Shapes: N tokens, V vocabulary, P a piece of it, S support entries (kappa), C columns of sums, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from smopd.kernels.head.shards import Shard
from smopd.kernels.reference.rows import LOGP_FLOOR, Target, row_chunks
from smopd.kernels.reference.topk import target_of
from smopd.kernels.types import LossSettings, LossTokens, compute_dtype, loss_target

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
        """(C, N): peak, total, slope of each level, the token's logit, the support's; of no logits yet."""
        n_support = 0 if self.target is None else self.target.ids_NS.shape[1]
        picked = SUMS * len(self.levels)
        shape = (picked + 1 + n_support, self.token_ids_N1.shape[0])
        sums_CN = self.token_ids_N1.new_zeros(shape, dtype=self.sums_dtype)
        sums_CN[0:picked:SUMS] = -torch.inf
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
    *,
    sums_dtype: torch.dtype | None = None,
    target_of: Callable[..., Target] = target_of,
) -> Plan:
    """sums_dtype: None: the logits' compute dtype. target_of: reference.target_of, or a backend's."""
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


def widened(block_NP: Tensor, temperature: float, spare: float) -> Tensor:
    """(N, P + 1): the logits over the temperature, and a column for what is written beside the piece."""
    n_rows, width = block_NP.shape
    wide_NP = block_NP.new_empty(n_rows, width + 1, dtype=compute_dtype(block_NP.dtype))
    wide_NP[:, width] = spare
    wide_NP[:, :width] = block_NP
    return wide_NP if temperature == 1.0 else wide_NP.div_(temperature)


def scan(plan: Plan, sums_CN: Tensor, tile_NP: Tensor, row: int, column: int) -> None:
    """Add a tile of logits to the sums: tokens row.., vocabulary column... Every logit comes once."""
    width = tile_NP.shape[1]
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
            wide_NP = widened(block_NP, level.temperature, -torch.inf)
            if level.off_support and hole_NS is not None:
                wide_NP.scatter_(1, hole_NS, -torch.inf)
            _merge_(plan.level_of(sums_CN[:, rows], index), _sums(wide_NP, level.entropy))


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


def _merge_(into_CN: Tensor, other: Tensor | tuple[Tensor, Tensor, Tensor]) -> None:
    """peak, total, slope of two disjoint sets of logits -> of their union."""
    peak_N = torch.maximum(into_CN[0], other[0])
    merged = []
    for part_peak_N, total_N, slope_N in (into_CN, other):
        shift_N = torch.where(part_peak_N == -torch.inf, 0.0, part_peak_N - peak_N)
        scale_N = shift_N.exp()
        merged.append((total_N * scale_N, (slope_N + shift_N * total_N) * scale_N))
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
            _merge_(plan.level_of(merged_CN, index), plan.level_of(other_CN, index))
        for into, got, wanted in zip(merged, plan.picked_of(other_CN), ids, strict=True):
            into.copy_(torch.where(places_in(wanted, start, size)[0], got, into))
        start += size
    return merged_CN
