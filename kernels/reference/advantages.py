"""Group advantages in plain PyTorch: GRPO, GDPO (Eq. 1 to 3) and GD2PO. CPUs use this backend, too.

As the tensors are small, all computations are in fp64. The results are fp32 (fp64 for fp64 rewards).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smopd.kernels.tokens import steady_sum
from smopd.kernels.types import CONFLICT_FLOOR, EQUAL_ULPS, TOKEN_VAR_EPS, AdvantageOptions, compute_dtype


@dataclass(frozen=True)
class _Groups:
    """Groups of responses. index_R[r] is the group of response r, size_R[g] is the size of group g."""

    index_R: Tensor
    size_R: Tensor

    def sum(self, values: Tensor) -> Tensor:
        """Return a tensor (R, ...) whose row g is the sum over group g."""
        return torch.zeros_like(values).index_add_(0, self.index_R, values)

    def extreme(self, values: Tensor, which: str) -> Tensor:
        index = self.index_R.view(-1, *[1] * (values.dim() - 1)).expand_as(values)
        start = torch.full_like(values, -torch.inf if which == "amax" else torch.inf)
        return start.scatter_reduce(0, index, values, which)


def _groups(group_R: Tensor) -> _Groups:
    sorted_R, order_R = group_R.sort(stable=True)
    number_R = torch.zeros_like(group_R)
    number_R[1:] = (sorted_R[1:] != sorted_R[:-1]).cumsum(0)
    index_R = torch.empty_like(group_R).scatter_(0, order_R, number_R)
    ones_R = torch.ones_like(group_R, dtype=torch.float64)
    return _Groups(index_R, torch.zeros_like(ones_R).index_add_(0, index_R, ones_R))


def _normalise(values_RK: Tensor, size_RK: Tensor, groups: _Groups, norm_eps: float, ulp: float) -> Tensor:
    """Return (value - mean) / (sigma + norm_eps), with mean and sigma over the group's values except NaN.

    The result is exactly 0 for a NaN, in a group with one value, and in a group whose values differ by at
    most EQUAL_ULPS ulps of the group's largest size_RK. size_RK: sum of a value's absolute terms.
    """
    known_RK = ~values_RK.isnan()
    values_RK = torch.where(known_RK, values_RK, 0.0)
    count_RK = groups.sum(known_RK.to(torch.float64))
    mean_RK = groups.sum(values_RK) / count_RK.clamp(min=1)
    centred_RK = torch.where(known_RK, values_RK - mean_RK[groups.index_R], 0.0)
    sigma_RK = (groups.sum(centred_RK**2) / (count_RK - 1).clamp(min=1)).sqrt()
    lowest_RK = groups.extreme(torch.where(known_RK, values_RK, torch.inf), "amin")
    highest_RK = groups.extreme(torch.where(known_RK, values_RK, -torch.inf), "amax")
    largest_RK = groups.extreme(torch.where(known_RK, size_RK, 0.0), "amax")
    varied_RK = (count_RK > 1) & (highest_RK - lowest_RK > EQUAL_ULPS * ulp * largest_RK)
    scale_RK = torch.where(varied_RK, sigma_RK + norm_eps, 1.0)
    return torch.where(varied_RK[groups.index_R], centred_RK / scale_RK[groups.index_R], 0.0)


def _whitened(adv_R: Tensor, count_R: Tensor, whiten: str, norm_eps: float, process_group: Any) -> Tensor:
    """Return adv_R whitened over the ranks of process_group. Each entry counts as count_R samples."""
    count = steady_sum(count_R)
    mean = steady_sum(count_R * adv_R) / count.clamp(min=1)
    m2 = steady_sum(count_R * (adv_R - mean) ** 2)
    if process_group is not None:
        count, mean, m2 = _merge_ranks(torch.stack([count, mean, m2]), process_group)
    variance = m2 / (count - 1).clamp(min=1)
    if whiten == "tokens":
        white_R = (adv_R - mean) * (variance + TOKEN_VAR_EPS).rsqrt()
    else:
        # With variance 0, the numerator is 0, too.
        scale = variance.sqrt() + norm_eps
        white_R = (adv_R - mean) / torch.where(scale > 0, scale, 1.0)
    return torch.where((count_R > 0) & (count > 1), white_R, 0.0)


def _merge_ranks(moments: Tensor, process_group: Any) -> Tensor:
    """Merge (n, mean, M2) over all ranks with one all-reduce and Chan's rule."""
    world = torch.distributed.get_world_size(process_group)
    table = torch.zeros(world, 3, dtype=moments.dtype, device=moments.device)
    table[torch.distributed.get_rank(process_group)] = moments
    torch.distributed.all_reduce(table, group=process_group)
    count_W, mean_W, m2_W = table.unbind(-1)
    count = count_W.sum()
    mean = (count_W * mean_W).sum() / count.clamp(min=1)
    return torch.stack([count, mean, (m2_W + count_W * (mean_W - mean) ** 2).sum()])


def advantages(
    rewards_RK: Tensor, group_R: Tensor, options: AdvantageOptions, process_group: Any = None
) -> tuple[Tensor, Tensor | None]:
    """Return adv_R and kept_R. Except for GD2PO, kept_R is None."""
    dtype = compute_dtype(rewards_RK.dtype)
    values_RK, weights_K = rewards_RK.to(torch.float64), options.weights_K
    weights_K = values_RK.new_ones(values_RK.shape[1]) if weights_K is None else weights_K.to(values_RK)
    groups, kept_R = _groups(group_R), None
    if options.kind == "grpo":
        # A reward of weight 0 has no effect, even if it is NaN.
        terms_RK = torch.where(weights_K != 0, weights_K * values_RK, 0.0)
        values_RK, sizes_RK = terms_RK.sum(-1, keepdim=True), terms_RK.abs().sum(-1, keepdim=True)
        weights_K = weights_K.new_ones(1)
    else:
        sizes_RK = values_RK.abs()
    adv_RK = _normalise(values_RK, sizes_RK, groups, options.norm_eps, torch.finfo(dtype).eps)
    parts_RK = adv_RK * weights_K
    adv_R = parts_RK.sum(-1)
    if options.kind == "gd2po":
        kept_R = ~_conflicts(adv_RK, parts_RK, options)
        kept_share_R = groups.sum(kept_R.to(torch.float64)) / groups.size_R.clamp(min=1)
        adv_R = torch.where(kept_R, adv_R * kept_share_R[groups.index_R], 0.0)
    if options.whiten is not None:
        count_R = torch.ones_like(adv_R)
        if options.whiten == "tokens" and options.lengths_R is not None:
            count_R = options.lengths_R.to(adv_R)
        scored_R = (~values_RK.isnan() & (weights_K != 0)).any(-1)
        counted_R = scored_R if kept_R is None else scored_R & kept_R
        count_R = torch.where(counted_R, count_R, 0.0)
        adv_R = _whitened(adv_R, count_R, options.whiten, options.norm_eps, process_group)
    return adv_R.to(dtype), kept_R


def _conflicts(adv_RK: Tensor, parts_RK: Tensor, options: AdvantageOptions) -> Tensor:
    """Return whether the rewards of each response disagree, (R,) bool."""
    signs_RK = torch.where(adv_RK.abs() > CONFLICT_FLOOR, parts_RK.sign(), 0.0)
    conflicts_R = (signs_RK > 0).any(-1) & (signs_RK < 0).any(-1)
    if options.snr_threshold is not None:
        share_R = parts_RK.sum(-1).abs() / (parts_RK.abs().sum(-1) + options.norm_eps)
        conflicts_R &= share_R < options.snr_threshold
    return conflicts_R
