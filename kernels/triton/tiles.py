"""The loss on tiles of logits on a GPU: launches of the kernels of triton/tile_kernels.py.

Between the passes a few numbers a row are torch, in float64.

Shapes: N tokens, P a piece of the vocabulary, S support entries (kappa), K = S + 1 slots, C columns of sums.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from smopd.kernels.head.tiles import Merged, Plan, Softmax, make_plan
from smopd.kernels.terms import LOGP_FLOOR, TAIL_FLOOR, Target
from smopd.kernels.tokens import weighted
from smopd.kernels.triton.mixture import teacher_mixture
from smopd.kernels.triton.rows import LOG2E
from smopd.kernels.triton.tile_kernels import repeats_kernel, tile_gradient_kernel, tile_scan_kernel
from smopd.kernels.types import Candidates, LossSettings, LossTokens, SparseTarget

_WARP = 32
_VECTOR_BYTES, _BLOCK_BYTES = 16, 32  # of a lane: at once, and in a block
_MOST_ID = 2**31 - 1
_NATIVE = isinstance(tile_scan_kernel, JITFunction)  # else it runs in Triton's interpreter
# Ten programs of 4 warps share a processor and hide each other's latencies; large ones interpret faster.
_WARPS = 4 if _NATIVE else 16
_PAIRS = 8 if _NATIVE else 1 << 20  # of slots that a lane compares at a time
_MOST_PER_WARP = 128  # slots


@dataclass(frozen=True)
class TileTarget(Target):
    """joined_NS: a repeated id's whole mass, in its first slot; 0 in its others."""

    joined_NS: Tensor


def target_of(target: SparseTarget | Candidates, dtype: torch.dtype, *, tail: bool) -> TileTarget:
    """The target made ready for the tiles. An id that no piece holds makes its row NaN."""
    if isinstance(target, SparseTarget):
        ids_NS, logps_NS, distinct = target.ids_NS, target.logps_NS, False
    else:
        union = (target.ids_NMS, target.logps_NMS.to(torch.float32), target.log_alpha, target.kappa)
        mixture = teacher_mixture(*union, merge=target.merge)
        ids_NS, logps_NS, distinct = mixture.ids_NS, mixture.logps_NS, target.merge
    ids_NS = ids_NS.clamp(-1, _MOST_ID).to(torch.int32)
    logps_NS = logps_NS.to(torch.float32).clone(memory_format=torch.contiguous_format)
    merged_NS = logps_NS if distinct else _merged(ids_NS, logps_NS)
    first_NS, joined_NS = merged_NS > -torch.inf, merged_NS.to(dtype).exp()
    logps_NS = (merged_NS if tail else logps_NS).to(dtype)
    q_NS = logps_NS.exp()
    mass_N = q_NS.sum(-1)
    tail_q_N = 1.0 - mass_N
    tail_q_N = torch.where(tail_q_N < TAIL_FLOOR, 0.0, tail_q_N)
    # What is looked up: where there is a tail the support, each id once; else all but the empty slots.
    ids_NS = torch.where(first_NS if tail else logps_NS != -torch.inf, ids_NS, -1)
    return TileTarget(ids_NS, logps_NS, q_NS, first_NS, first_NS.any(-1), mass_N, tail_q_N, joined_NS)


def _merged(ids_NS: Tensor, logps_NS: Tensor) -> Tensor:
    n_rows, n_slots = ids_NS.shape
    merged_NS = torch.empty_like(logps_NS)
    if merged_NS.numel() > 0:
        slots = triton.next_power_of_2(n_slots)
        warps = max(1, slots // _MOST_PER_WARP)
        together = min(slots, max(1, _PAIRS * warps * _WARP // slots))
        repeats_kernel[(n_rows,)](
            ids_NS.contiguous(),
            logps_NS,
            merged_NS,
            n_slots,
            K=slots,
            W=together,
            num_warps=warps,
            enable_fp_fusion=True,
        )
    return merged_NS


@dataclass(frozen=True)
class _Shape:
    """A launch's constexprs of a tile."""

    stride: int
    constexprs: dict[str, Any]


def _shape(tile_NP: Tensor, n_slots: int) -> _Shape:
    itemsize = tile_NP.element_size()
    consecutive = math.gcd(_VECTOR_BYTES // itemsize, tile_NP.storage_offset(), tile_NP.stride(0))
    blocks = {"K": triton.next_power_of_2(n_slots), "C": consecutive, "L": _WARPS * _WARP}
    blocks["R"] = _BLOCK_BYTES // itemsize // consecutive
    return _Shape(tile_NP.stride(0) // consecutive, blocks)


def _scales(settings: LossSettings) -> tuple[float, float]:
    return LOG2E.value / settings.temperature, LOG2E.value / settings.kl_temperature


class TileLoss:
    """head.tiles.TileLoss, with sums and target in float64."""

    @staticmethod
    def plan_of(tokens: LossTokens, settings: LossSettings, logits_dtype: torch.dtype) -> Plan:
        with torch.cuda.device_of(tokens.token_ids_N):
            return make_plan(tokens, settings, logits_dtype, target_of, torch.float64)

    def __init__(self, plan: Plan):
        self.plan = plan
        ids_N1 = plan.token_ids_N1.clamp(-1, _MOST_ID).to(torch.int32)
        self.slots_NK = ids_N1 if plan.target is None else torch.cat((ids_N1, plan.target.ids_NS), 1)
        self.two = len(plan.levels) == 2
        self.options = {
            "TWO": self.two,
            "NATIVE": _NATIVE,
            "num_warps": _WARPS,
            "num_stages": 1,
            "enable_fp_fusion": True,
        }
        self._gradients: tuple[Merged, _Gradients] | None = None

    def scan(self, sums_CN: Tensor, tile_NP: Tensor, row: int, column: int) -> None:
        (n_rows, width), n_slots = tile_NP.shape, self.slots_NK.shape[1]
        if tile_NP.numel() == 0:
            return
        shape, settings = _shape(tile_NP, n_slots), self.plan.settings
        inverses = (1.0 / settings.temperature, 1.0 / settings.kl_temperature)
        with torch.cuda.device_of(tile_NP):
            tile_scan_kernel[(n_rows,)](
                tile_NP, self.slots_NK[row:], sums_CN[:, row:], column, width, n_slots,
                shape.stride, sums_CN.stride(0), *_scales(settings), *inverses,
                TAIL=self.plan.target is not None and settings.tail, **shape.constexprs, **self.options,
            )  # fmt: skip

    def gradient_(self, merged: Merged, tile_NP: Tensor, row: int, column: int) -> None:
        if tile_NP.numel() == 0:
            return
        if self._gradients is None or self._gradients[0] is not merged:
            self._gradients = merged, _gradients(self.plan, merged)
        made, (n_rows, width) = self._gradients[1], tile_NP.shape
        n_slots = made.slots_NK.shape[1]
        shape = _shape(tile_NP, n_slots)
        with torch.cuda.device_of(tile_NP):
            tile_gradient_kernel[(n_rows,)](
                tile_NP, made.slots_NK[row:], made.slot_grads_NK[row:], made.rows_CN[:, row:],
                merged.idle_N[row:], column, width, n_slots, shape.stride, made.rows_CN.stride(0),
                *_scales(self.plan.settings), CURVED=made.curved, **shape.constexprs, **self.options,
            )  # fmt: skip


@dataclass(frozen=True)
class _Gradients:
    """What tile_gradient_kernel reads: the rows' coefficients, fp32, and the entries that come from sums."""

    rows_CN: Tensor
    slots_NK: Tensor
    slot_grads_NK: Tensor
    curved: bool


def _top(softmax: Softmax) -> Tensor:
    """The largest logit of what streams, as it is; 0 where there is none."""
    return torch.where(softmax.peak_N == -torch.inf, 0.0, softmax.peak_N * softmax.level.temperature)


def _top_logp(softmax: Softmax) -> Tensor:
    return (softmax.peak_N - softmax.base_N - softmax.log_total_N).clamp(min=LOGP_FLOOR)


def _gradients(plan: Plan, merged: Merged) -> _Gradients:
    """By the closed form of reference/rows.py."""
    first, last, target = merged.softmaxes[0], merged.softmaxes[-1], merged.target
    two, zero_N = first is not last, torch.zeros_like(first.logp_N)
    pull, kl_pull_N = merged.pulls[0], merged.pulls[-1].kl_N
    dlogp_N = (zero_N if pull.logp_N is None else pull.logp_N) / first.level.temperature
    dkl_N = None if kl_pull_N is None or target is None else kl_pull_N / last.level.temperature
    tail_q_N = merged.tail_q_N
    kl_level_N = zero_N
    if target is not None:
        kl_level_N = weighted(dkl_N, target.mass_N if tail_q_N is None else target.mass_N + tail_q_N)
    level_N = -dlogp_N if two else kl_level_N - dlogp_N
    curved = pull.entropy_N is not None and first.entropy_N is not None
    bend_N, entropy_N = zero_N, zero_N
    if pull.entropy_N is not None and first.entropy_N is not None:
        bend_N, entropy_N = -pull.entropy_N / first.level.temperature, first.entropy_N

    logp_N = _top_logp(first)
    p_N = logp_N.exp()
    share_N = weighted(dkl_N, zero_N if tail_q_N is None else tail_q_N)  # off the support
    off_N = torch.where(last.log_stream_N == -torch.inf, 0.0, share_N * (-last.log_stream_N).exp())
    row_level_N, row_kl_level_N = p_N * (level_N + bend_N * (logp_N + entropy_N)), zero_N
    if two:
        row_kl_level_N = kl_level_N * _top_logp(last).exp() - off_N
    else:
        row_level_N = row_level_N - off_N
    rows = (_top(first), row_level_N, p_N * bend_N * math.log(2.0), _top(last), row_kl_level_N)

    def dense(logps: Tensor, kl_logps: Tensor) -> Tensor:
        """level p + bend p (log p + entropy), (N, 1) or (N, S), of a share of nothing off the support."""
        curve = bend_N[:, None] * (logps.clamp(min=LOGP_FLOOR) + entropy_N[:, None])
        grads = logps.exp() * (level_N[:, None] + curve)
        return grads + kl_level_N[:, None] * kl_logps.exp() if two else grads

    token_ids_N1 = plan.token_ids_N1.clamp(-1, _MOST_ID).to(torch.int32)
    token_grad_N1 = dense(first.logp_N[:, None], last.logp_N[:, None]) + dlogp_N[:, None]
    if last.off_logp_N is not None:
        of_off_N = torch.where(last.off_logp_N == -torch.inf, 0.0, (last.logp_N - last.off_logp_N).exp())
        token_grad_N1 = token_grad_N1 - (share_N * of_off_N)[:, None]
    slots_NK, slot_grads_NK = token_ids_N1, token_grad_N1
    if isinstance(target, TileTarget) and last.student_logps_NS is not None:
        kl_logps_NS = logps_NS = last.student_logps_NS
        if two:
            x_NS = (kl_logps_NS + (last.base_N + last.log_total_N)[:, None]) * last.level.temperature
            logps_NS = x_NS / first.level.temperature - (first.base_N + first.log_total_N)[:, None]
        grads_NS = dense(logps_NS, kl_logps_NS)
        if dkl_N is not None:
            grads_NS = grads_NS - weighted(dkl_N[:, None], target.joined_NS)
        is_token_NS = target.first_NS & (target.ids_NS == token_ids_N1)
        grads_NS = grads_NS + torch.where(is_token_NS, dlogp_N[:, None], 0.0)
        token_ids_N1 = token_ids_N1.masked_fill(is_token_NS.any(-1, keepdim=True), -1)
        slots_NK = torch.cat((token_ids_N1, target.ids_NS.masked_fill(~target.first_NS, -1)), 1)
        slot_grads_NK = torch.cat((token_grad_N1, grads_NS), 1)
    rows_CN = torch.stack([column.to(torch.float32) for column in rows])
    return _Gradients(rows_CN, slots_NK, slot_grads_NK.to(torch.float32), curved)
