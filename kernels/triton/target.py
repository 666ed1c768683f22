"""A row's sparse target in the row kernel's prologue, and the parts of the row around its support.

Slots are compared in pairs, all K against W at a time, so that the pairs fit into registers. What pairs tell
a slot is one sum: each result of a sum over threads costs barriers to hand around. An empty slot has
log-probability -inf and any id; a row with another id outside the vocabulary is NaN, and nothing is read or
written there.

Shapes: K slots of a row's target (a power of two), W of them, M teachers, S support entries, L lanes (R and C
    as in triton/rows.py).
"""

import triton
import triton.language as tl

from smopd.kernels.triton.rows import LN2, LOG2E, NEG_INF

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
def teachers_target(
    ids_ptr, logps_ptr, log_alpha_ptr, stride_alpha_n, stride_alpha_m, row, kappa,
    V: tl.constexpr, M: tl.constexpr, S: tl.constexpr, K: tl.constexpr, W: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    """The union of the teachers' candidates, the kappa largest kept (Eq. 6; merged first: Eq. 5).

    Ties go to the lower id when merged, else to the lower teacher and then to its own order.
    """
    slot_K = tl.arange(0, K)
    inside_K = slot_K < M * S
    ids_K = tl.load(ids_ptr + row * (M * S) + slot_K, mask=inside_K, other=-1)
    logps_K = tl.load(logps_ptr + row * (M * S) + slot_K, mask=inside_K, other=NEG_INF).to(tl.float32)
    alpha_ptr = log_alpha_ptr + row * stride_alpha_n
    logps_K += tl.load(alpha_ptr + (slot_K // S).to(tl.int64) * stride_alpha_m, mask=inside_K, other=0.0)
    ids_K, logps_K = bounded(ids_K, logps_K, V)
    order_K = slot_K
    if MERGE:
        logps_K = merge_repeats(ids_K, logps_K, K, W)
        order_K = ids_K
    rank_K = tl.zeros((K,), tl.int32)
    for number in range(0, K // W):
        other = part(logps_K, number, NEG_INF, K, W)[None, :]
        before = part(order_K, number, -(2**31), K, W)[None, :] < order_K[:, None]
        wins = (other > logps_K[:, None]) | ((other == logps_K[:, None]) & before)
        rank_K += tl.sum(wins.to(tl.int32), 1)
    return ids_K, tl.where(rank_K < kappa, logps_K, NEG_INF)


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
    ids_K, first_K, R: tl.constexpr, L: tl.constexpr, C: tl.constexpr, K: tl.constexpr, W: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    """A segment is what one lane takes from one block, R C elements, at most 32.

    Returns at one slot for each segment that holds support a bit for each such element, at the others 0 or
    less; and for each lane a bit (of an integer BITS) for each block of which it leaves its segment out.
    """
    kind: tl.constexpr = tl.int32 if R * C <= 16 else tl.int64
    not_here: tl.constexpr = -(1 << 20) if R * C <= 16 else -(1 << 40)
    slot_K = tl.arange(0, K)
    block_K = ids_K // (R * L * C)
    lane_K = (ids_K // C) % L
    element_K = ((ids_K // (L * C)) % R) * C + ids_K % C
    segment_K = tl.where(first_K, block_K * L + lane_K, -1)
    bit_K = first_K.to(kind) << tl.where(first_K, element_K, 0).to(kind)
    holes_K = tl.zeros((K,), kind)
    for number in range(0, K // W):
        same = part(segment_K, number, -1, K, W)[None, :] == segment_K[:, None]
        before = part(slot_K, number, -1, K, W)[None, :] < slot_K[:, None]
        bit = part(bit_K, number, 0, K, W)[None, :]
        holes_K += tl.sum(tl.where(same, tl.where(before, not_here, bit), 0), 1)

    lane_L = tl.arange(0, L)
    skipped_L = tl.zeros((L,), BITS)
    segment_K = tl.where(holes_K > 0, block_K * L + lane_K, -1)
    FEW: tl.constexpr = min(W, 32 if K <= 32 else 8)  # at a time in the registers of every lane
    for number in range(0, K // FEW):
        segment = part(segment_K, number, -1, K, FEW)[:, None]
        bit = (segment >= 0).to(BITS) << tl.maximum(segment // L, 0).to(BITS)
        skipped_L += tl.sum(tl.where(segment % L == lane_L[None, :], bit, 0), 0)
    return holes_K, skipped_L


@triton.jit
def segments(
    row_ptr, ids_K, holes_K, V: tl.constexpr,
    R: tl.constexpr, L: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """The elements of the segments that the lanes leave out, -inf for the support in them.

    A row for each slot, padded with -inf so that there are L elements or more.
    """
    element = tl.arange(0, R * C if K * R * C > L else L // K)
    start_K = (ids_K // (R * L * C)) * (R * L * C) + ((ids_K // C) % L) * C
    offs_v = start_K[:, None] + ((element // C) * (L * C) + element % C)[None, :]
    # Padding is shifted as the last element is: by the integer's bits or more is undefined.
    is_hole = (holes_K[:, None] >> tl.minimum(element, R * C - 1)[None, :]) & 1
    wanted = (holes_K > 0)[:, None] & (is_hole == 0) & (offs_v < V) & (element < R * C)[None, :]
    return tl.load(row_ptr + offs_v, mask=wanted, other=NEG_INF).to(tl.float32)
