"""Targets and the forward KL's gradient as they were, for bench.gpu.candidates: to be deleted with it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from smopd.kernels.terms import TAIL_FLOOR
from smopd.kernels.triton import loss
from smopd.kernels.triton.mixture import DTYPES, teacher_mixture
from smopd.kernels.triton.rows import (
    LN2,
    LOG2E,
    NEG_INF,
    column,
    load_block,
    load_whole,
    sparse_gradient,
    widen,
    write_block,
)
from smopd.kernels.triton.target import RowTargets, given_target, n_entries, n_slots
from smopd.kernels.types import Candidates, KlOptions, SparseTarget

_PAIRS = 8  # of slots that a lane compares at a time
_SLOTS_A_WARP = 32

_STREAM_WARPS, _STREAM_PROGRAMS = 8, 4  # of a program that only streams; of those on a processor
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


@triton.jit(do_not_specialize=["n_rows"])
def kl_gradient_kernel(
    logits_ptr, grad_ptr, token_ids_ptr,
    ids_ptr, id_logps_ptr, masses_ptr, statistics_ptr, dlogp_ptr, dkl_ptr,
    n_rows, stride_logits_n, stride_grad_n, scale, inv_temperature,
    V: tl.constexpr, K: tl.constexpr, R: tl.constexpr, L: tl.constexpr, C: tl.constexpr,
    TAIL: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """A row. statistics: (4, N), the pairs (h, s) of the whole row and of what is off the support (rows.py).

    id_logps_ptr: one log-probability for each distinct id. Rows' strides are in units of C elements.
    """
    BLOCK: tl.constexpr = R * L * C
    BLOCKS: tl.constexpr = (V + BLOCK - 1) // BLOCK
    DTYPE: tl.constexpr = logits_ptr.dtype.element_ty
    PACKED: tl.constexpr = BLOCKS > 1 and C > 1 and DTYPE.primitive_bitwidth == 16
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_logits_n * C
    grad_row_ptr = grad_ptr + row * stride_grad_n * C
    if BLOCKS > 1:
        near = load_whole(row_ptr, 0, BLOCK, False, PACKED)
    last = load_block(row_ptr, BLOCKS - 1, V, BLOCK, False, False)
    token_id = tl.load(token_ids_ptr + row)
    offs_K = row * K + tl.arange(0, K)
    ids_K = tl.load(ids_ptr + offs_K)
    id_logps_K = tl.load(id_logps_ptr + offs_K)
    teacher_mass = tl.load(masses_ptr + row)
    tail_q = tl.load(masses_ptr + n_rows + row) if TAIL else 0.0
    h, s = tl.load(statistics_ptr + row), tl.load(statistics_ptr + n_rows + row)
    off_h, off_s = tl.load(statistics_ptr + 2 * n_rows + row), tl.load(statistics_ptr + 3 * n_rows + row)
    dlogp, dkl = column(dlogp_ptr, row), column(dkl_ptr, row)
    token_inside = (token_id >= 0) & (token_id < V)
    token = token_id.to(tl.int32)
    token_x = tl.load(row_ptr + token, mask=token_inside, other=float("nan")).to(tl.float32)
    x_K = tl.load(row_ptr + ids_K, mask=id_logps_K > NEG_INF, other=NEG_INF).to(tl.float32)

    coefficients, token_grad, token_apart, grad_K = sparse_gradient(
        token, token_inside, token_x, x_K, ids_K, id_logps_K, (off_h, off_s, 0.0, off_h, off_s),
        (h, s, 0.0, h, s), 0.0, teacher_mass, tail_q,
        dlogp, dkl, 0.0, scale, scale, inv_temperature, inv_temperature, TAIL, False, False,
    )  # fmt: skip
    x = widen(last, DTYPE, False, NATIVE)
    write_block(grad_row_ptr, BLOCKS - 1, x, coefficients, scale, scale, V, BLOCK, False, False, False)
    if BLOCKS > 1:
        for block in tl.range(0, BLOCKS - 2, loop_unroll_factor=2):
            x = widen(near, DTYPE, False, NATIVE)
            near = load_whole(row_ptr, block + 1, BLOCK, False, PACKED)
            write_block(grad_row_ptr, block, x, coefficients, scale, scale, V, BLOCK, True, False, False)
        x = widen(near, DTYPE, False, NATIVE)
        write_block(grad_row_ptr, BLOCKS - 2, x, coefficients, scale, scale, V, BLOCK, True, False, False)

    tl.debug_barrier()  # the entries below are the last to be written
    tl.store(grad_row_ptr + ids_K, grad_K.to(grad_ptr.dtype.element_ty), mask=id_logps_K > NEG_INF)
    tl.store(grad_row_ptr + token, token_grad.to(grad_ptr.dtype.element_ty), mask=token_apart)


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


def forward_kl_gradient(
    logits_NV: Tensor,
    token_ids_N: Tensor,
    target: SparseTarget | Candidates,
    options: KlOptions,
    dlogp_N: Tensor | None,
    dkl_N: Tensor | None,
    statistics_4N: Tensor,
) -> Tensor:
    """The gradient of sum(dlogp logp + dkl kl) in the logits, given forward_kl_rows' statistics."""
    grad_NV = torch.empty_like(logits_NV)
    n_rows, n_vocab = logits_NV.shape
    if n_rows == 0:
        return grad_NV
    consecutive = min(loss._aligned_elements(logits_NV), loss._aligned_elements(grad_NV))
    warps = _STREAM_WARPS if n_vocab > loss._WARP * loss._MAX_ELEMENTS else 1
    repeats = (loss._VECTOR_BYTES * 2 // logits_NV.element_size()) // consecutive
    ready = row_targets(target, n_vocab, warps * loss._WARP, repeats, consecutive, tail=options.tail)
    kl_gradient_kernel[(n_rows,)](
        logits_NV, grad_NV, token_ids_N.contiguous(),
        ready.ids_NK, ready.logps_NK if ready.id_logps_NK is None else ready.id_logps_NK, ready.masses_2N,
        statistics_4N, loss._small(dlogp_N), loss._small(dkl_N),
        n_rows, logits_NV.stride(0) // consecutive, grad_NV.stride(0) // consecutive,
        LOG2E.value / options.temperature, 1.0 / options.temperature,
        V=n_vocab, K=ready.ids_NK.shape[1], R=repeats, L=warps * loss._WARP, C=consecutive,
        TAIL=options.tail, NATIVE=loss._NATIVE, num_warps=warps, num_stages=1,
        maxnreg=min(255, loss._REGISTERS // (warps * loss._WARP * _STREAM_PROGRAMS)),
    )  # fmt: skip
    return grad_NV
