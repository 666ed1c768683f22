"""The rows' sparse targets, made ready in a launch of their own, and the parts of a row around its support.

A few warps make a row's target (of several teachers that of their union, triton/mixture.py): one
log-probability for each distinct id, the masses, and for the tail bucket where in the row the support lies.
The row kernel (triton/row_kernel.py) has sixteen warps, which would all wait for this in each of its 62 rows
a processor; here thousands of rows are on the way at once.

Slots are compared in pairs, all K against W at a time, so that the pairs fit into registers. What pairs tell
a slot is one sum: each result of a sum over threads costs barriers to hand around. An empty slot has
log-probability -inf and any id; a row with another id outside the vocabulary, of several teachers among those
that are kept, is NaN, and nothing is read or written there.

Shapes: N tokens, K slots of a row's target (a power of two), W of them, S support entries, L lanes (R and C
    as in triton/rows.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from smopd.kernels.terms import TAIL_FLOOR
from smopd.kernels.triton.mixture import DTYPES, teacher_mixture
from smopd.kernels.triton.rows import LN2, LOG2E, NEG_INF
from smopd.kernels.types import Candidates, SparseTarget

MAX_SUPPORT = 512  # slots of a target: their pairs are compared
_PAIRS = 8  # of slots that a lane compares at a time
_SLOTS_A_WARP = 32

_TAIL_FLOOR = tl.constexpr(TAIL_FLOOR)
_NOT_HERE = tl.constexpr(-1.0e30)  # in a sum of positive numbers: it counts at another slot


@triton.jit
def part(x_K, number, EMPTY: tl.constexpr, K: tl.constexpr, W: tl.constexpr):
    """Slots number W to number W + W - 1."""
    if K == W:
        return x_K
    else:
        chosen = (tl.arange(0, K // W) == number)[:, None]
        return tl.max(tl.where(chosen, tl.reshape(x_K, (K // W, W)), EMPTY), 0)


@triton.jit
def bounded(ids_K, logps_K, V: tl.constexpr):
    """(ids as int32, log-probabilities): NaN where an id is outside [0, V), but for an empty slot's."""
    outside_K = (ids_K < 0) | (ids_K >= V)
    return ids_K.to(tl.int32), tl.where(outside_K & (logps_K > NEG_INF), float("nan"), logps_K)


@triton.jit
def given_target(ids_ptr, logps_ptr, row, V: tl.constexpr, S: tl.constexpr, K: tl.constexpr):
    """(ids, log-probabilities) of the target as given."""
    slot_K = tl.arange(0, K)
    ids_K = tl.load(ids_ptr + row * S + slot_K, mask=slot_K < S, other=-1)
    logps_K = tl.load(logps_ptr + row * S + slot_K, mask=slot_K < S, other=NEG_INF).to(tl.float32)
    return bounded(ids_K, logps_K, V)


@triton.jit
def merge_repeats(ids_K, logps_K, K: tl.constexpr, W: tl.constexpr):
    """The log of the mass of all slots with an id, at the largest (then first) of them; -inf elsewhere.

    A slot that is NaN stays NaN, and adds to no other.
    """
    slot_K = tl.arange(0, K)
    mass_K = tl.zeros((K,), tl.float32)
    for number in range(0, K // W):
        other = part(logps_K, number, NEG_INF, K, W)[None, :]
        before = part(slot_K, number, -1, K, W)[None, :] < slot_K[:, None]
        same = (part(ids_K, number, -1, K, W)[None, :] == ids_K[:, None]) & (other > NEG_INF)
        larger = (other > logps_K[:, None]) | ((other == logps_K[:, None]) & before)
        power = tl.exp2((other - logps_K[:, None]) * LOG2E)
        mass_K += tl.sum(tl.where(same, tl.where(larger, _NOT_HERE, power), 0.0), 1)
    merged_K = tl.where(mass_K > 0, tl.fma(tl.log2(mass_K), LN2, logps_K), NEG_INF)
    return tl.where(logps_K != logps_K, logps_K, merged_K)


@triton.jit
def support_segments(
    ids_K,
    first_K,
    R: tl.constexpr,
    L: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    PART: tl.constexpr,
):
    """A segment is what one lane takes from one block, R C elements, at most 32.

    Returns at one slot for each segment that holds support a bit for each such element, at the others 0 or
    less; and every slot's block and lane.
    """
    kind: tl.constexpr = tl.int32 if R * C <= 16 else tl.int64
    not_here: tl.constexpr = -(1 << 20) if R * C <= 16 else -(1 << 40)
    slot_K = tl.arange(0, K)
    local_K = ids_K % PART
    block_K = local_K // (R * L * C)
    lane_K = (local_K // C) % L + (ids_K // PART) * L
    element_K = ((local_K // (L * C)) % R) * C + local_K % C
    segment_K = tl.where(first_K, block_K * (1 << 16) + lane_K, -1)
    bit_K = first_K.to(kind) << tl.where(first_K, element_K, 0).to(kind)
    holes_K = tl.zeros((K,), kind)
    for number in range(0, K // W):
        same = part(segment_K, number, -1, K, W)[None, :] == segment_K[:, None]
        before = part(slot_K, number, -1, K, W)[None, :] < slot_K[:, None]
        bit = part(bit_K, number, 0, K, W)[None, :]
        holes_K += tl.sum(tl.where(same, tl.where(before, not_here, bit), 0), 1)
    return holes_K, block_K, lane_K


@triton.jit
def segments(
    row_ptr, ids_E, holes_E, V: tl.constexpr, R: tl.constexpr, L: tl.constexpr, C: tl.constexpr,
    EACH: tl.constexpr,
):  # fmt: skip
    """The elements of the segments that the lanes leave out, -inf for the support in them and for padding.

    One-dimensional, EACH elements for each slot: ids_E and holes_E are its own, repeated.
    """
    element_E = tl.arange(0, ids_E.shape[0]) % EACH
    start_E = (ids_E // (R * L * C)) * (R * L * C) + ((ids_E // C) % L) * C
    offs_v = start_E + (element_E // C) * (L * C) + element_E % C
    # Padding is shifted as the last element is: by the integer's bits or more is undefined.
    is_hole_E = (holes_E >> tl.minimum(element_E, R * C - 1)) & 1
    wanted_E = (holes_E > 0) & (is_hole_E == 0) & (offs_v < V) & (element_E < R * C)
    return tl.load(row_ptr + offs_v, mask=wanted_E, other=NEG_INF).to(tl.float32)


@triton.jit(do_not_specialize=["n_rows"])
def _target_kernel(
    ids_ptr, logps_ptr, n_rows,
    out_ids_ptr, out_logps_ptr, out_id_logps_ptr, masses_ptr, holes_ptr, skipped_ptr,
    V: tl.constexpr, S: tl.constexpr, K: tl.constexpr, W: tl.constexpr,
    R: tl.constexpr, L: tl.constexpr, C: tl.constexpr, PART: tl.constexpr, LANES: tl.constexpr,
    DISTINCT: tl.constexpr,
):  # fmt: skip
    """A row. There is holes_ptr if there is a tail bucket; there is out_id_logps_ptr where it tells more."""
    TAIL: tl.constexpr = holes_ptr is not None
    row = tl.program_id(0).to(tl.int64)
    ids_K, logps_K = given_target(ids_ptr, logps_ptr, row, V, S, K)
    id_logps_K = logps_K if DISTINCT else merge_repeats(ids_K, logps_K, K, W)
    if TAIL:
        logps_K = id_logps_K
    offs_K = row * K + tl.arange(0, K)
    tl.store(out_ids_ptr + offs_K, ids_K)
    tl.store(out_logps_ptr + offs_K, logps_K)
    if out_id_logps_ptr is not None:
        tl.store(out_id_logps_ptr + offs_K, id_logps_K)
    tl.store(masses_ptr + row, tl.sum(tl.exp2(logps_K * LOG2E), 0))
    if TAIL:
        # In fp64: it is a difference. Ids that repeat are merged in fp32 before.
        tail_q = (1.0 - tl.sum(tl.exp2(logps_K.to(tl.float64) * LOG2E), 0)).to(tl.float32)
        tl.store(masses_ptr + n_rows + row, tl.where(tail_q >= _TAIL_FLOOR, tail_q, 0.0))
        skipped_ptr += row * LANES
        LANES2: tl.constexpr = triton.next_power_of_2(LANES)
        offs_L = tl.arange(0, LANES2)
        tl.store(skipped_ptr + offs_L, tl.zeros((LANES2,), skipped_ptr.dtype.element_ty), mask=offs_L < LANES)
        holes_K, block_K, lane_K = support_segments(ids_K, id_logps_K > NEG_INF, R, L, C, K, W, PART)
        tl.store(holes_ptr + offs_K, holes_K)
        is_one_K = holes_K > 0
        bit_K = is_one_K.to(skipped_ptr.dtype.element_ty) << tl.where(is_one_K, block_K, 0)
        tl.debug_barrier()  # the zeros are there
        tl.atomic_or(skipped_ptr + lane_K, bit_K, mask=is_one_K, sem="relaxed")


@dataclass(frozen=True)
class RowTargets:
    """What the row kernel loads of a target, K slots a row.

    Attributes:
        logps_NK: the log-probabilities whose sum is the KL: every slot's as given, one for each id with the
            tail bucket.
        id_logps_NK: one for each distinct id, -inf in its other slots; None: logps_NK is that.
        masses_2N: the target's mass and, with the tail bucket, what is left for the bucket.
        holes_NK: see support_segments; with the tail bucket.
        skipped_NL: a bit for each block of which a lane leaves its segment out; with the tail bucket.
    """

    ids_NK: Tensor
    logps_NK: Tensor
    id_logps_NK: Tensor | None
    masses_2N: Tensor
    holes_NK: Tensor | None
    skipped_NL: Tensor | None


def n_entries(target: SparseTarget | Candidates | None) -> int:
    """Entries of a row's target, of several teachers those that are kept."""
    if target is None:
        return 0
    if isinstance(target, SparseTarget):
        return target.ids_NS.shape[1]
    return min(target.ids_NMS.shape[1] * target.ids_NMS.shape[2], target.kappa)


def n_slots(target: SparseTarget | Candidates | None) -> int:
    """Slots of a row's target in the kernels, a power of two."""
    return triton.next_power_of_2(max(n_entries(target), 1))


def row_targets(
    target: SparseTarget | Candidates,
    n_vocab: int,
    lanes: int,
    repeats: int,
    consecutive: int,
    *,
    tail: bool,
    part: int | None = None,
) -> RowTargets:
    """The targets of all rows, whose blocks are of repeats x lanes x consecutive elements, in one launch.

    Several teachers are united (Eq. 6; merged first: Eq. 5) in one before it.
    """
    slots, distinct = n_slots(target), False
    if isinstance(target, SparseTarget):
        ids, logps = target.ids_NS, target.logps_NS
    else:
        logps_NMS = target.logps_NMS if target.logps_NMS.dtype in DTYPES else target.logps_NMS.float()
        candidates = (target.ids_NMS, logps_NMS, target.log_alpha, n_entries(target))
        mixture = teacher_mixture(*candidates, merge=target.merge)
        ids, logps, distinct = mixture.ids_NS, mixture.logps_NS, target.merge
    n_rows = ids.shape[0]

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=ids.device)

    def bits(few: bool) -> torch.dtype:
        return torch.int32 if few else torch.int64

    all_lanes = lanes * (1 if part is None else -(-n_vocab // part))
    ready = RowTargets(
        ids_NK=empty(n_rows, slots, dtype=torch.int32),
        logps_NK=empty(n_rows, slots),
        id_logps_NK=None if distinct or tail else empty(n_rows, slots),
        masses_2N=empty(2, n_rows),
        holes_NK=empty(n_rows, slots, dtype=bits(repeats * consecutive <= 16)) if tail else None,
        skipped_NL=empty(
            n_rows, all_lanes, dtype=bits((part or n_vocab) <= 32 * repeats * lanes * consecutive)
        )
        if tail
        else None,
    )
    warps = max(slots // _SLOTS_A_WARP, 1)
    _target_kernel[(n_rows,)](
        ids.contiguous(), logps.contiguous(), n_rows,
        ready.ids_NK, ready.logps_NK, ready.id_logps_NK, ready.masses_2N, ready.holes_NK, ready.skipped_NL,
        V=n_vocab, S=ids.shape[-1], K=slots, W=min(slots, max(1, _PAIRS * 32 * warps // slots)),
        R=repeats, L=lanes, C=consecutive, DISTINCT=distinct, PART=part or n_vocab, LANES=all_lanes,
        num_warps=warps, num_stages=1,
    )  # fmt: skip
    return ready
