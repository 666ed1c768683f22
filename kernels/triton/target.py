"""The target kernel prepares the sparse targets for the row kernel and the split kernel.

One program per row (one warp per 128 slots) merges repeated ids and computes the masses. For the tail bucket,
it also locates the support in the row. An id outside the vocabulary makes its row NaN, unless its slot is
empty.

Shapes: K slots of a target (a power of two), S support entries; R, L and C as in rows.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from smopd.kernels.triton.mixture import teacher_mixture
from smopd.kernels.triton.rows import LN2, LOG2E, NEG_INF
from smopd.kernels.types import TAIL_FLOOR, SparseTarget

MAX_SUPPORT = 512  # upper limit of slots per target, because every pair is compared
SEGMENT_BITS = 6  # bits of a block's index: a lane has at most 64 blocks
_SLOTS_A_WARP = 128

_TAIL_FLOOR = tl.constexpr(TAIL_FLOOR)
_UNROLL = tl.constexpr(8)
_SEGMENT_BITS = tl.constexpr(SEGMENT_BITS)


@triton.jit
def _given_target(ids_ptr, logps_ptr, row, V: tl.constexpr, S: tl.constexpr, K: tl.constexpr):
    """Load int32 ids and logps. A logp is NaN if its id is outside [0, V) and its slot is not empty."""
    slot_K = tl.arange(0, K)
    ids_K = tl.load(ids_ptr + row * S + slot_K, mask=slot_K < S, other=-1)
    logps_K = tl.load(logps_ptr + row * S + slot_K, mask=slot_K < S, other=NEG_INF).to(tl.float32)
    outside_K = (ids_K < 0) | (ids_K >= V)
    return ids_K.to(tl.int32), tl.where(outside_K & (logps_K > NEG_INF), float("nan"), logps_K)


@triton.jit
def _merge_repeats(ids_ptr, logps_ptr, powers_ptr, ids_K, logps_K, is_last_K, S: tl.constexpr):
    """Return the log of each id's total mass at the id's last slot, and -inf at its other slots.

    ids_ptr points to the row's ids_K, and powers_ptr to scratch for K numbers.
    """
    slot_K = tl.arange(0, ids_K.shape[0])
    top_K = logps_K  # the largest log-probability of an id
    for j in tl.range(0, S, loop_unroll_factor=_UNROLL):
        logp = tl.load(logps_ptr + j).to(tl.float32)
        top_K = tl.where((ids_K == tl.load(ids_ptr + j)) & (logp > top_K), logp, top_K)
    tl.store(powers_ptr + slot_K, tl.where(logps_K == top_K, 1.0, tl.exp2((logps_K - top_K) * LOG2E)))
    tl.debug_barrier()
    mass_K = tl.zeros_like(logps_K)
    for j in tl.range(0, S, loop_unroll_factor=_UNROLL):
        mass_K += tl.where(ids_K == tl.load(ids_ptr + j), tl.load(powers_ptr + j), 0.0)
    tl.debug_barrier()
    return tl.where(is_last_K, tl.fma(tl.log2(mass_K), LN2, top_K), NEG_INF)


@triton.jit
def segments(
    row_ptr, ids_E, holes_E, length, R: tl.constexpr, L: tl.constexpr, C: tl.constexpr, EACH: tl.constexpr
):
    """Load the elements of the segments that the lanes skip. Support and padding are -inf.

    A slot has EACH elements, so ids_E and holes_E repeat its values. length: number of elements of the row.
    """
    element_E = tl.arange(0, ids_E.shape[0]) % EACH
    start_E = (ids_E // (R * L * C)) * (R * L * C) + ((ids_E // C) % L) * C
    offs_v = start_E + (element_E // C) * (L * C) + element_E % C
    # Limit the shift for padding, because shifts by 32 or more are undefined.
    is_hole_E = (holes_E >> tl.minimum(element_E, R * C - 1)) & 1
    wanted_E = (holes_E > 0) & (is_hole_E == 0) & (offs_v < length) & (element_E < R * C)
    return tl.load(row_ptr + offs_v, mask=wanted_E, other=NEG_INF).to(tl.float32)


@triton.jit(do_not_specialize=["n_rows"])
def _target_kernel(
    ids_ptr, logps_ptr, n_rows,
    out_ids_ptr, out_logps_ptr, out_id_logps_ptr, masses_ptr, holes_ptr, skipped_ptr,
    V: tl.constexpr, S: tl.constexpr, K: tl.constexpr,
    R: tl.constexpr, L: tl.constexpr, C: tl.constexpr, PART: tl.constexpr,
    DISTINCT: tl.constexpr,
):  # fmt: skip
    """Prepare a row. holes_ptr is None if there is no tail bucket.

    out_id_logps_ptr is None if its values would equal those of out_logps_ptr. One slot at a time is compared
    with all slots, by id and by segment. The outputs first serve as scratch for the values to compare.
    """
    HOLES: tl.constexpr = holes_ptr is not None
    SHARED: tl.constexpr = PART < V
    row = tl.program_id(0).to(tl.int64)
    if HOLES and not SHARED:
        skipped_ptr += row * L
        tl.store(skipped_ptr + tl.arange(0, L), tl.zeros((L,), skipped_ptr.dtype.element_ty))
    slot_K = tl.arange(0, K)
    offs_K = row * K + slot_K
    ids_K, logps_K = _given_target(ids_ptr, logps_ptr, row, V, S, K)
    live_K = logps_K > NEG_INF
    ids_K = tl.where(live_K, ids_K, -1 - slot_K)  # unique negative ids
    out_ids_ptr += row * K
    tl.store(out_ids_ptr + slot_K, ids_K)
    if HOLES:
        tl.static_assert(R * C <= 16)
        place_K = tl.where(live_K, ids_K, 0)
        local_K = place_K % PART
        block_K = local_K // (R * L * C)
        lane_K = (local_K // C) % L
        element_K = ((local_K // (L * C)) % R) * C + local_K % C
        segment_K = ((place_K // PART * L + lane_K) << _SEGMENT_BITS) | block_K
        code_K = tl.where(live_K, segment_K * 16 + element_K, ids_K * 16)
        codes_ptr = holes_ptr + row * K
        tl.store(codes_ptr + slot_K, code_K)
    same_K = slot_K  # becomes the last slot with the same id
    bits_K = tl.zeros((K,), tl.int32)  # bits of the support elements in the same segment
    tl.debug_barrier()
    if HOLES:
        for j in tl.range(0, S, loop_unroll_factor=_UNROLL):
            code = tl.load(codes_ptr + j)
            together_K = ((code_K ^ code) & -16) == 0
            bits_K |= tl.where(together_K, 1 << (code & 15), 0)
            if not DISTINCT:
                same_K = tl.where(code_K == code, j, same_K)
    elif not DISTINCT:
        for j in tl.range(0, S, loop_unroll_factor=_UNROLL):
            same_K = tl.where(ids_K == tl.load(out_ids_ptr + j), j, same_K)
    id_logps_K = logps_K
    is_last_K = same_K == slot_K
    if not DISTINCT:
        repeated = tl.min(is_last_K.to(tl.int32), 0) == 0
        if repeated:
            id_logps_K = _merge_repeats(
                out_ids_ptr, logps_ptr + row * S, out_logps_ptr + row * K, ids_K, logps_K, is_last_K, S
            )
    if HOLES:
        logps_K = id_logps_K
    tl.store(out_logps_ptr + offs_K, logps_K)
    if out_id_logps_ptr is not None:
        tl.store(out_id_logps_ptr + offs_K, id_logps_K)
    tl.store(masses_ptr + row, tl.sum(tl.exp2(logps_K * LOG2E), 0))
    if HOLES:
        # Computed in fp64 to avoid cancellation. Repeated ids were merged in fp32.
        tail_q = (1.0 - tl.sum(tl.exp2(logps_K.to(tl.float64) * LOG2E), 0)).to(tl.float32)
        tl.store(masses_ptr + n_rows + row, tl.where(tail_q >= _TAIL_FLOOR, tail_q, 0.0))
        holds_K = live_K & is_last_K & ((bits_K & -bits_K) == 1 << element_K)  # the segment's first element
        tl.debug_barrier()  # wait until all lanes have read the codes
        tl.store(codes_ptr + slot_K, tl.where(holds_K, bits_K, 0))
        if SHARED:
            tl.store(skipped_ptr + offs_K, tl.where(holds_K, segment_K, -1))
        else:
            bit_K = holds_K.to(skipped_ptr.dtype.element_ty) << tl.where(holds_K, block_K, 0)
            tl.atomic_or(skipped_ptr + lane_K, bit_K, mask=holds_K, sem="relaxed")


class RowTargets(NamedTuple):
    """Prepared targets with K slots per row. A segment is one lane's part of a block: R C <= 16 elements.

    Attributes:
        ids_NK: ids, or unique negative numbers in slots that are empty or NaN.
        logps_NK: log-probabilities for the KL, one per slot, or one per distinct id with a tail bucket.
        id_logps_NK: log-probability of each distinct id, -inf in its other slots. None if it equals logps_NK.
        masses_2N: mass of the target and, with a tail bucket, of the tail.
        holes_NK: only with a tail bucket. Bits of a segment's support elements in one slot, 0 in the others.
        skipped_NL: only with a tail bucket. (N, L): for each lane, a bit for each block whose segment it
            skips. If programs share a row, (N, K): the segment's index with the block in the low
            SEGMENT_BITS, or -1 where holes_NK is 0.
    """

    ids_NK: Tensor
    logps_NK: Tensor
    id_logps_NK: Tensor | None
    masses_2N: Tensor
    holes_NK: Tensor | None
    skipped_NL: Tensor | None


def n_slots(target: SparseTarget | None) -> int:
    """Return the number of slots per row, a power of two."""
    return 1 if target is None else triton.next_power_of_2(max(target.n_entries, 1))


def row_targets(
    target: SparseTarget,
    n_vocab: int,
    lanes: int,
    repeats: int,
    consecutive: int,
    *,
    tail: bool,
    part: int | None = None,
) -> RowTargets:
    """Prepare the targets of all rows in one launch. For candidates, another launch first builds the mixture.

    Blocks have repeats x lanes x consecutive elements. part: elements per program if programs share a row.
    """
    ids, logps, slots = target.ids, target.logps, n_slots(target)
    if target.log_alpha is not None:
        logps = logps.float() if logps.dtype == torch.float64 else logps
        mixture = teacher_mixture(ids, logps, target.log_alpha, target.n_entries, merge=target.merge)
        ids, logps = mixture.ids_NS, mixture.logps_NS
    distinct = target.log_alpha is not None and target.merge
    n_rows = ids.shape[0]

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=ids.device)

    part = min(part or n_vocab, n_vocab)
    if not tail:
        lanes, repeats, consecutive, part = 0, 1, 1, n_vocab  # compile no variants of unused constants
    bits = torch.int32 if n_vocab <= 32 * repeats * lanes * consecutive else torch.int64
    skipped = (lanes, bits) if part == n_vocab else (slots, torch.int32)
    ready = RowTargets(
        ids_NK=empty(n_rows, slots, dtype=torch.int32),
        logps_NK=empty(n_rows, slots),
        id_logps_NK=None if distinct or tail else empty(n_rows, slots),
        masses_2N=empty(2, n_rows),
        holes_NK=empty(n_rows, slots, dtype=torch.int32) if tail else None,
        skipped_NL=empty(n_rows, skipped[0], dtype=skipped[1]) if tail else None,
    )
    _target_kernel[(n_rows,)](
        ids.contiguous(), logps.contiguous(), n_rows,
        *ready,
        V=n_vocab, S=ids.shape[-1], K=slots, R=repeats, L=lanes, C=consecutive, PART=part,
        DISTINCT=distinct, num_warps=max(slots // _SLOTS_A_WARP, 1), num_stages=1,
        enable_fp_fusion=True,
    )  # fmt: skip
    return ready
