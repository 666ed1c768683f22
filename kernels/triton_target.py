"""A row's sparse target in the row kernel's prologue, and the parts of the row around its support.

Slots are compared in pairs, W against all K at a time, so that the pairs fit into registers. An empty slot
has id -1 and log-probability -inf.

Shapes: K slots of a row's target (a power of two), W of them, M teachers, S support entries, L lanes (R and C
    as in triton_rows.py).
"""

import triton
import triton.language as tl

from smopd.kernels.triton_rows import LN2, LOG2E, NEG_INF, absorb, finite, merge_lanes, no_stats


@triton.jit
def part(x_K, number, EMPTY: tl.constexpr, K: tl.constexpr, W: tl.constexpr):
    """Slots number W to number W + W - 1."""
    if K == W:
        return x_K
    else:
        chosen = (tl.arange(0, K // W) == number)[:, None]
        return tl.max(tl.where(chosen, tl.reshape(x_K, (K // W, W)), EMPTY), 0)


@triton.jit
def given_target(ids_ptr, logps_ptr, row, S: tl.constexpr, K: tl.constexpr):
    """(ids, log-probabilities) of the target as given."""
    slot_K = tl.arange(0, K)
    ids_K = tl.load(ids_ptr + row * S + slot_K, mask=slot_K < S, other=-1).to(tl.int32)
    logps_K = tl.load(logps_ptr + row * S + slot_K, mask=slot_K < S, other=NEG_INF).to(tl.float32)
    return tl.where(logps_K == NEG_INF, -1, ids_K), logps_K


@triton.jit
def teachers_target(
    ids_ptr, logps_ptr, log_alpha_ptr, stride_alpha_n, stride_alpha_m, row, kappa,
    M: tl.constexpr, S: tl.constexpr, K: tl.constexpr, W: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    """The union of the teachers' candidates, the kappa largest kept (Eq. 6; merged first: Eq. 5).

    Ties go to the lower id when merged, else to the lower teacher and then to its own order.
    """
    slot_K = tl.arange(0, K)
    inside_K = slot_K < M * S
    ids_K = tl.load(ids_ptr + row * (M * S) + slot_K, mask=inside_K, other=-1).to(tl.int32)
    logps_K = tl.load(logps_ptr + row * (M * S) + slot_K, mask=inside_K, other=NEG_INF).to(tl.float32)
    alpha_ptr = log_alpha_ptr + row * stride_alpha_n
    logps_K += tl.load(alpha_ptr + (slot_K // S) * stride_alpha_m, mask=inside_K, other=0.0)
    ids_K = tl.where(logps_K == NEG_INF, -1, ids_K)
    order_K = slot_K
    if MERGE:
        first_K, logps_K = merge_repeats(ids_K, logps_K, K, W)
        logps_K = tl.where(first_K, logps_K, NEG_INF)
        order_K = ids_K
    rank_K = tl.zeros((K,), tl.int32)
    for number in range(0, K // W):
        other_W = part(logps_K, number, NEG_INF, K, W)[:, None]
        before = part(order_K, number, -1, K, W)[:, None] < order_K[None, :]
        wins = (other_W > logps_K[None, :]) | ((other_W == logps_K[None, :]) & before)
        rank_K += tl.sum(wins.to(tl.int32), 0)
    kept_K = (rank_K < kappa) & (logps_K > NEG_INF)
    return tl.where(kept_K, ids_K, -1), tl.where(kept_K, logps_K, NEG_INF)


@triton.jit
def merge_repeats(ids_K, logps_K, K: tl.constexpr, W: tl.constexpr):
    """(whether a slot is the first with its id, log of the mass of all slots with its id)."""
    slot_K = tl.arange(0, K)
    earlier_K = tl.zeros((K,), tl.int32)
    peak_K = tl.full((K,), NEG_INF, tl.float32)
    for number in range(0, K // W):
        same = (part(ids_K, number, -1, K, W)[:, None] == ids_K[None, :]) & (ids_K >= 0)[None, :]
        before = part(slot_K, number, -1, K, W)[:, None] < slot_K[None, :]
        earlier_K += tl.sum((same & before).to(tl.int32), 0)
        other_W = part(logps_K, number, NEG_INF, K, W)[:, None]
        peak_K = tl.maximum(peak_K, tl.max(tl.where(same, other_W, NEG_INF), 0))
    peak_K = finite(peak_K)
    mass_K = tl.zeros((K,), tl.float32)
    for number in range(0, K // W):
        same = (part(ids_K, number, -1, K, W)[:, None] == ids_K[None, :]) & (ids_K >= 0)[None, :]
        other_W = part(logps_K, number, NEG_INF, K, W)[:, None]
        mass_K += tl.sum(tl.where(same, tl.exp2((other_W - peak_K[None, :]) * LOG2E), 0.0), 0)
    return (earlier_K == 0) & (ids_K >= 0), tl.fma(tl.log2(mass_K), LN2, peak_K)


# ---- the row around its support ----


@triton.jit
def support_segments(
    ids_K, first_K, R: tl.constexpr, L: tl.constexpr, C: tl.constexpr, K: tl.constexpr, W: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    """Where the support lies: a segment is what one lane takes from one block, R C elements.

    Returns for each slot (block, lane, holes, owner): holes has a bit for each element of the segment that
    is in the support; owner marks one slot for each segment. Then for each lane a bit (of an integer BITS)
    for each block of which it leaves its segment out.
    """
    slot_K = tl.arange(0, K)
    lane_L = tl.arange(0, L)
    block_K = ids_K // (R * L * C)
    lane_K = (ids_K // C) % L
    segment_K = tl.where(first_K, block_K * L + lane_K, -1)
    position_K = ((ids_K // (L * C)) % R) * C + ids_K % C
    bit_K = tl.full((K,), 1, tl.int64) << tl.where(first_K, position_K, 0).to(tl.int64)
    earlier_K = tl.zeros((K,), tl.int32)
    holes_K = tl.zeros((K,), tl.int64)
    for number in range(0, K // W):
        segment_W = part(segment_K, number, -1, K, W)[:, None]
        same = (segment_W == segment_K[None, :]) & (segment_W >= 0)
        before = part(slot_K, number, -1, K, W)[:, None] < slot_K[None, :]
        earlier_K += tl.sum((same & before).to(tl.int32), 0)
        holes_K += tl.sum(tl.where(same, part(bit_K, number, 0, K, W)[:, None], 0), 0)
    owner_K = first_K & (earlier_K == 0)

    skipped_L = tl.zeros((L,), BITS)
    owned_K = tl.where(owner_K, lane_K, -1)
    block_bit_K = tl.full((K,), 1, BITS) << tl.where(owner_K, block_K, 0).to(BITS)
    for number in range(0, K // W):
        hit = part(owned_K, number, -1, K, W)[:, None] == lane_L[None, :]
        bit_W = tl.where(part(owned_K, number, -1, K, W) >= 0, part(block_bit_K, number, 0, K, W), 0)
        skipped_L += tl.sum(tl.where(hit, bit_W[:, None], 0), 0)
    return block_K, lane_K, holes_K, owner_K, skipped_L


@triton.jit
def segment_stats(
    row_ptr, block_K, lane_K, holes_K, owner_K, scale, kl_scale,
    V: tl.constexpr, R: tl.constexpr, L: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
    ENTROPY: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """The statistics of the segments that the lanes leave out, without the support in them."""
    element = tl.arange(0, R * C)
    offset = (element // C) * (L * C) + element % C
    offset = (block_K * (R * L * C) + lane_K * C)[:, None] + offset[None, :]
    hole = (holes_K[:, None] >> element[None, :].to(tl.int64)) & 1
    wanted = owner_K[:, None] & (hole == 0) & (offset < V)
    x = tl.load(row_ptr + offset, mask=wanted, other=NEG_INF).to(tl.float32)
    stats = absorb(x, owner_K, no_stats(K), scale, kl_scale, 1, K, R * C, False, ENTROPY, TWO)
    return merge_lanes(stats, ENTROPY, TWO)
