"""Loss and forward KL on a GPU: one kernel, one program a row, the gradient written in the same launch.

A program streams its row once for the statistics, keeping the row's end in registers as it came, then goes
back over it in reverse for the gradient: the end from registers, the rest out of the L2 cache. The entries of
the target's support and the token's are read before anything is written, and written last, from fp32. With
the tail bucket a lane leaves out of its sums those segments that hold support; they are gathered and summed
apart, so that the student's mass off the support is a sum of its own, not a difference.

No atomics and nothing between rows: results are repeatable, and a row does not depend on its batch.

Shapes: N tokens, V vocabulary, M teachers, S support entries (kappa), K slots of a row's target, W of them,
    R repeats, L lanes and C consecutive elements of a block (triton_rows.py, triton_target.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from smopd.kernels.reference_rows import TAIL_FLOOR
from smopd.kernels.triton_mixture import MAX_CANDIDATES, teacher_mixture
from smopd.kernels.triton_rows import (
    LN2,
    LOG2E,
    NEG_INF,
    absorb,
    few_stats,
    finite,
    gradient_coefficients,
    join_stats,
    load_block,
    merge_lanes,
    no_stats,
    policy_terms,
    softmax_gradient,
    store_block,
    weighted,
    widen,
    zero_row,
)
from smopd.kernels.triton_target import (
    given_target,
    merge_repeats,
    segments,
    support_segments,
    teachers_target,
)
from smopd.kernels.types import Candidates, LossSettings, LossTokens, SparseTarget, TokenTerms, loss_target

MAX_SUPPORT = 512  # slots of a target: their pairs are compared
MAX_POOLED = 128  # candidates that the row kernel unites itself; more go through teacher_mixture's kernel

_TAIL_FLOOR = tl.constexpr(TAIL_FLOOR)


# ---- kernel ----


@triton.jit
def _column(ptr, row):
    """A token's value; 0 of a column that is not there."""
    return 0.0 if ptr is None else tl.load(ptr + row)


@triton.jit
def _row_kernel(
    logits_ptr, grad_ptr, token_ids_ptr, target_ids_ptr, target_logps_ptr, log_alpha_ptr,
    adv_ptr, old_logp_ptr, pg_weight_ptr, kl_weight_ptr, ent_weight_ptr, reverse_adv_ptr, reverse_weight_ptr,
    dlogp_ptr, dkl_ptr, terms_ptr, clipped_ptr,
    n_rows, stride_logits_n, stride_grad_n, stride_alpha_n, stride_alpha_m,
    scale, kl_scale, inv_temperature, inv_kl_temperature,
    clip_low, clip_high, dual_clip, opd_coef, entropy_coef, kappa,
    V: tl.constexpr, M: tl.constexpr, S: tl.constexpr, K: tl.constexpr, W: tl.constexpr,
    R: tl.constexpr, L: tl.constexpr, C: tl.constexpr, LAST: tl.constexpr, UNROLL: tl.constexpr,
    MERGE: tl.constexpr, DISTINCT: tl.constexpr, TAIL: tl.constexpr, TWO: tl.constexpr,
    CURVED: tl.constexpr, DUAL: tl.constexpr, PPO: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """A row of the loss (there is adv) or of the forward KL. A pointer may be None, and then costs nothing.

    Rows' strides are in units of C elements. LAST: blocks at the row's end, held if there is a gradient.
    MERGE: the teachers. DISTINCT: no id comes twice. TAIL: one more bucket, for all that is off the support.
    TWO: the forward KL has a temperature of its own. CURVED: the entropy has a gradient.
    """
    LOSS: tl.constexpr = adv_ptr is not None
    GRADIENT: tl.constexpr = grad_ptr is not None
    TARGET: tl.constexpr = target_ids_ptr is not None
    REVERSE: tl.constexpr = reverse_adv_ptr is not None
    HOLES: tl.constexpr = TARGET and TAIL
    BLOCK: tl.constexpr = R * L * C
    BLOCKS: tl.constexpr = (V + BLOCK - 1) // BLOCK
    STREAMED: tl.constexpr = BLOCKS - LAST
    BITS: tl.constexpr = tl.int32 if BLOCKS <= 32 else tl.int64

    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_logits_n * C
    grad_row_ptr = row_ptr
    if GRADIENT:
        grad_row_ptr = grad_ptr + row * stride_grad_n * C
    if LOSS:
        pg_weight = _column(pg_weight_ptr, row)
        kl_weight = _column(kl_weight_ptr, row)
        ent_weight = _column(ent_weight_ptr, row)
        reverse_weight = _column(reverse_weight_ptr, row)
        if (pg_weight == 0) & (kl_weight == 0) & (ent_weight == 0) & (reverse_weight == 0):
            for column in tl.static_range(7):
                tl.store(terms_ptr + column * n_rows + row, 0.0)
            tl.store(clipped_ptr + row, 0)
            if GRADIENT:
                zero_row(grad_row_ptr, V, BLOCK)
            return

    # What streams first is on its way while the target is prepared.
    ahead = load_block(row_ptr, 0, V, BLOCK, BLOCKS > 1, STREAMED > 0)
    token = tl.load(token_ids_ptr + row).to(tl.int32)
    token_x = tl.load(row_ptr + token).to(tl.float32)
    if TARGET:
        if log_alpha_ptr is None:
            ids_K, logps_K = given_target(target_ids_ptr, target_logps_ptr, row, S, K)
        else:
            ids_K, logps_K = teachers_target(
                target_ids_ptr, target_logps_ptr, log_alpha_ptr, stride_alpha_n, stride_alpha_m, row, kappa,
                M, S, K, W, MERGE,
            )  # fmt: skip
        id_logps_K = logps_K if DISTINCT else merge_repeats(ids_K, logps_K, K, W)
        if TAIL:
            logps_K = id_logps_K
        first_K = id_logps_K > NEG_INF  # one slot for each id
        x_K = tl.load(row_ptr + ids_K, mask=logps_K > NEG_INF, other=NEG_INF).to(tl.float32)

    stats = no_stats(L)
    skipped_L = tl.zeros((L,), BITS)
    if HOLES:
        holes_K, skipped_L = support_segments(ids_K, first_K, R, L, C, K, W, BITS)
        around = segments(row_ptr, ids_K, holes_K, V, R, L, C, K)
        rows: tl.constexpr = max(K * R * C // L, 1)
        stats = absorb(around, skipped_L, stats, scale, kl_scale, rows, L, 1, False, LOSS, TWO)
    for block in tl.range(0, STREAMED, loop_unroll_factor=UNROLL):
        x = ahead
        ahead = load_block(row_ptr, block + 1, V, BLOCK, True, True)
        keep_L = ((skipped_L >> block) & 1) == 0
        stats = absorb(widen(x, False, NATIVE), keep_L, stats, scale, kl_scale, R, L, C, HOLES, LOSS, TWO)
    held = ()
    for i in tl.static_range(LAST):
        if i == 0:
            x = ahead
        else:
            x = load_block(row_ptr, STREAMED + i, V, BLOCK, i < LAST - 1, False)
        keep_L = ((skipped_L >> (STREAMED + i)) & 1) == 0
        stats = absorb(widen(x, False, NATIVE), keep_L, stats, scale, kl_scale, R, L, C, HOLES, LOSS, TWO)
        if GRADIENT:
            held = held + (x,)  # noqa: RUF005  (Triton's language has no star)

    # off: the row's statistics without its support if there is a tail bucket, else the same as the whole's.
    off = merge_lanes(stats, LOSS, TWO)
    whole = off
    if HOLES:
        whole = join_stats(off, few_stats(tl.where(first_K, x_K, NEG_INF), scale, kl_scale, TWO), TWO)
    h, s, w, kl_h, kl_s = whole
    # In fp64: the log ratio is a difference of what has been rounded at 10 or 20.
    exact_logp = (token_x.to(tl.float64) * scale - finite(h) - tl.log2(s)) * LN2
    logp = exact_logp.to(tl.float32)

    kl = 0.0
    teacher_mass = 0.0
    student_mass = 0.0
    tail_q = 0.0
    if TARGET:
        q_K = tl.exp2(logps_K * LOG2E)
        student_K = (tl.fma(x_K, kl_scale, -finite(kl_h)) - tl.log2(kl_s)) * LN2
        kl = tl.sum(tl.where(q_K > 0, q_K * (logps_K - student_K), 0.0), 0)
        teacher_mass = tl.sum(q_K, 0)
        student_mass = tl.sum(tl.where(first_K, tl.exp2(student_K * LOG2E), 0.0), 0)
        if TAIL:
            tail_q = tl.maximum(1.0 - teacher_mass, 0.0)
            tail_q = tl.where(tail_q < _TAIL_FLOOR, 0.0, tail_q)
            tail_logp = (finite(off[3]) - finite(kl_h) + tl.log2(off[4]) - tl.log2(kl_s)) * LN2
            kl += tl.where(tail_q > 0, tail_q * (tl.log2(tail_q) * LN2 - tail_logp), 0.0)

    entropy = 0.0
    if LOSS:
        entropy = (tl.log2(s) - w / s) * LN2
        raw = tl.zeros((), tl.float32)
        if old_logp_ptr is not None:
            raw = (exact_logp - tl.load(old_logp_ptr + row)).to(tl.float32)
        surrogate, slope, reverse, reverse_slope, clipped = policy_terms(
            raw, tl.load(adv_ptr + row), _column(reverse_adv_ptr, row), clip_low, clip_high, dual_clip,
            REVERSE, DUAL, PPO,
        )  # fmt: skip
        tl.store(terms_ptr + row, logp)
        tl.store(terms_ptr + n_rows + row, entropy)
        tl.store(terms_ptr + 2 * n_rows + row, kl)
        tl.store(terms_ptr + 3 * n_rows + row, teacher_mass)
        tl.store(terms_ptr + 4 * n_rows + row, student_mass)
        tl.store(terms_ptr + 5 * n_rows + row, surrogate)
        tl.store(terms_ptr + 6 * n_rows + row, reverse)
        tl.store(clipped_ptr + row, clipped.to(tl.int8))
    elif terms_ptr is not None:
        tl.store(terms_ptr + row, logp)
        tl.store(terms_ptr + n_rows + row, kl)

    if GRADIENT:
        bend = 0.0
        if LOSS:
            dkl = opd_coef * kl_weight if TARGET else 0.0
            reverse_coef = opd_coef * reverse_weight if REVERSE else 0.0
            if CURVED:
                bend = entropy_coef * ent_weight
            if (pg_weight == 0) & (dkl == 0) & (reverse_coef == 0) & (bend == 0):
                zero_row(grad_row_ptr, V, BLOCK)
                return
            dlogp = weighted(pg_weight, slope) + weighted(reverse_coef, reverse_slope)
            bend *= inv_temperature
        else:
            dlogp = _column(dlogp_ptr, row)
            dkl = _column(dkl_ptr, row)
        dlogp *= inv_temperature
        dkl *= inv_kl_temperature
        level = -dlogp
        kl_level = dkl * (teacher_mass + tail_q)
        if not TWO:
            level += kl_level

        off_h, off_level, off_curve, off_kl_h, off_kl_level = gradient_coefficients(
            off, whole, level, bend, kl_level, entropy, TWO
        )
        if HOLES:
            share = tl.where(off[4] == 0, 0.0, dkl * tail_q / off[4])  # of the tail's teacher mass
            if TWO:
                off_kl_level -= share
            else:
                off_level -= share
        coefficients = (off_h, off_level, off_curve, off_kl_h, off_kl_level)
        token_grad = softmax_gradient(token_x, coefficients, scale, kl_scale, CURVED, TWO) + dlogp
        token_apart = True
        if TARGET:
            at_support = coefficients
            if TAIL:
                at_support = gradient_coefficients(whole, whole, level, bend, kl_level, entropy, TWO)
            grad_K = softmax_gradient(x_K, at_support, scale, kl_scale, CURVED, TWO)
            grad_K -= dkl * tl.exp2(id_logps_K * LOG2E)
            grad_K += tl.where(ids_K == token, dlogp, 0.0)
            token_apart = tl.sum((first_K & (ids_K == token)).to(tl.int32), 0) == 0

        tl.debug_barrier()  # the entries above are read before anything is overwritten
        if STREAMED > 0:
            ahead = load_block(row_ptr, STREAMED - 1, V, BLOCK, True, False)
        for i in tl.static_range(LAST):
            x = widen(held[i], True, NATIVE)
            g = softmax_gradient(x, coefficients, scale, kl_scale, CURVED, TWO)
            store_block(grad_row_ptr, STREAMED + i, g, V, BLOCK, i < LAST - 1)
        for i in tl.range(1, STREAMED, loop_unroll_factor=2):
            x = widen(ahead, False, NATIVE)
            ahead = load_block(row_ptr, STREAMED - 1 - i, V, BLOCK, True, False)
            g = softmax_gradient(x, coefficients, scale, kl_scale, CURVED, TWO)
            store_block(grad_row_ptr, STREAMED - i, g, V, BLOCK, True)
        if STREAMED > 0:
            x = widen(ahead, False, NATIVE)
            g = softmax_gradient(x, coefficients, scale, kl_scale, CURVED, TWO)
            store_block(grad_row_ptr, 0, g, V, BLOCK, True)

        tl.debug_barrier()
        out: tl.constexpr = grad_ptr.dtype.element_ty
        if TARGET:
            tl.store(grad_row_ptr + ids_K, grad_K.to(out), mask=first_K)
        tl.store(grad_row_ptr + token, token_grad.to(out), mask=token_apart)


# ---- launcher ----

_NATIVE = isinstance(_row_kernel, JITFunction)  # else it runs in Triton's interpreter
_WARP = 32
_REGISTERS = 1 << 16  # of a processor; ptxas is told a lane's, or it spills a few for one more program there
_VECTOR_BYTES = 16
_MAX_BLOCKS = 64  # of a row: a lane has a bit for each
_MAX_ELEMENTS = 32  # of a lane in a block
MAX_VOCAB = _MAX_BLOCKS * 16 * _WARP * _MAX_ELEMENTS
_PAIRS = 8  # of slots that a lane compares at a time
_COLUMNS = (
    "adv", "old_logp", "pg_weight", "kl_weight", "ent_weight", "reverse_adv", "reverse_weight", "dlogp", "dkl"
)  # fmt: skip


@dataclass(frozen=True)
class _Configuration:
    """A program's warps, a lane's elements of a block, and the blocks that registers hold."""

    warps: int
    elements: int
    held: int


def _configuration(n_vocab: int, dtype: torch.dtype, *, aligned: bool = True) -> _Configuration:
    """A row that fits is held whole; else 16 warps have 128 registers a lane, and 24 hold the row's end."""
    elements, held = (8, 4) if dtype == torch.float32 else (16, 3)
    if not aligned:
        held = 2  # single elements take more registers
    warps = next((warps for warps in (1, 4, 8) if n_vocab <= warps * _WARP * elements * held), 16)
    while n_vocab > _MAX_BLOCKS * warps * _WARP * elements and elements < _MAX_ELEMENTS:
        elements, held = 2 * elements, 2
    return _Configuration(warps, elements, held)


def _aligned_elements(rows_NV: Tensor) -> int:
    """Consecutive elements, at most 16 bytes, that start aligned in every row."""
    most = _VECTOR_BYTES // rows_NV.element_size()
    return math.gcd(most, rows_NV.storage_offset(), rows_NV.stride(0))


@dataclass(frozen=True)
class _Support:
    """A row kernel's target. log_alpha_NM: the ids and log-probabilities are candidates of M teachers."""

    ids: Tensor | None = None
    logps: Tensor | None = None
    log_alpha_NM: Tensor | None = None
    n_teachers: int = 0
    n_support: int = 0
    kappa: int = 0
    merge: bool = False
    distinct: bool = False


def _support(target: SparseTarget | Candidates | None) -> _Support:
    if target is None:
        return _Support()
    if isinstance(target, SparseTarget):
        return _Support(
            target.ids_NS.contiguous(), target.logps_NS.contiguous(), n_support=target.ids_NS.shape[1]
        )
    n_rows, n_teachers, n_support = target.ids_NMS.shape
    if n_teachers * n_support > MAX_POOLED:
        candidates = (target.ids_NMS, target.logps_NMS, target.log_alpha, target.kappa)
        mixture = teacher_mixture(*candidates, merge=target.merge)
        return _Support(mixture.ids_NS, mixture.logps_NS, n_support=target.kappa, distinct=target.merge)
    log_alpha_NM = target.log_alpha.to(torch.float32).expand(n_rows, n_teachers)
    return _Support(
        target.ids_NMS.contiguous(), target.logps_NMS.contiguous(), log_alpha_NM,
        n_teachers, n_support, target.kappa, target.merge, target.merge,
    )  # fmt: skip


def unserved(
    op: str, tensor: Tensor, *, n_support: int = 0, n_pooled: int = 0, n_vocab: int | None = None
) -> str | None:
    """Why the kernel cannot serve a target of n_support entries, of n_pooled candidates; None: it can.

    n_vocab: where the tensor is not the logits.
    """
    n_vocab = tensor.shape[1] if n_vocab is None else n_vocab
    if n_vocab > MAX_VOCAB:
        return f"V is {n_vocab}, expected at most {MAX_VOCAB}"
    if n_support > MAX_SUPPORT:
        return f"the target has {n_support} entries, expected at most {MAX_SUPPORT}"
    if n_pooled > MAX_CANDIDATES:
        return f"M * S is {n_pooled}, expected at most {MAX_CANDIDATES}"
    return None


def _launch(
    op: str,
    logits_NV: Tensor,
    token_ids_N: Tensor,
    target: SparseTarget | Candidates | None,
    settings: LossSettings,
    grad_NV: Tensor | None,
    columns: dict[str, Tensor | None],
    terms_CN: Tensor | None,
    clipped_N: Tensor | None = None,
) -> None:
    """columns: by _COLUMNS' names; terms_CN: seven rows with the loss's columns, else two, or None."""
    n_rows, n_vocab = logits_NV.shape
    if n_rows == 0:
        return
    support = _support(target)
    why_not = unserved(op, logits_NV, n_support=support.n_support)
    if why_not is not None:
        raise ValueError(f"{op}: {why_not}")
    consecutive = _aligned_elements(logits_NV)
    if grad_NV is not None:
        consecutive = min(consecutive, _aligned_elements(grad_NV))
    aligned = consecutive * logits_NV.element_size() == _VECTOR_BYTES
    shape = _configuration(n_vocab, logits_NV.dtype, aligned=aligned)
    lanes = shape.warps * _WARP
    slots = triton.next_power_of_2(max(max(support.n_teachers, 1) * support.n_support, 1))
    two = target is not None and settings.temperature != settings.kl_temperature
    # At least two: the last block may be cut off, the others are whole. Two softmaxes take more registers.
    last = 2 if grad_NV is None else max(2, shape.held - two)
    # Without a gradient to hold blocks for, two programs fit on a processor.
    programs = 2 if grad_NV is None and not two and slots <= 64 else 1
    small = {
        name: None if column is None else column.to(torch.float32).contiguous()
        for name, column in columns.items()
    }
    _row_kernel[(n_rows,)](
        logits_NV, grad_NV, token_ids_N.contiguous(), support.ids, support.logps, support.log_alpha_NM,
        *(small.get(name) for name in _COLUMNS), terms_CN, clipped_N,
        n_rows, logits_NV.stride(0) // consecutive,
        0 if grad_NV is None else grad_NV.stride(0) // consecutive,
        *((0, 0) if support.log_alpha_NM is None else support.log_alpha_NM.stride()),
        LOG2E.value / settings.temperature,
        LOG2E.value / (settings.kl_temperature if two else settings.temperature),
        1.0 / settings.temperature, 1.0 / settings.kl_temperature,
        1.0 - settings.clip_low, 1.0 + settings.clip_high, settings.dual_clip or 0.0,
        settings.opd_coef, settings.entropy_coef, support.kappa,
        V=n_vocab, M=support.n_teachers, S=support.n_support, K=slots,
        W=min(slots, max(1, _PAIRS * lanes // slots)),
        R=shape.elements // consecutive, L=lanes, C=consecutive,
        LAST=min(triton.cdiv(n_vocab, lanes * shape.elements), last),
        UNROLL=1 if logits_NV.element_size() == 2 and programs == 2 else 2,
        MERGE=support.merge, DISTINCT=support.distinct, TAIL=target is not None and settings.tail, TWO=two,
        CURVED=grad_NV is not None and settings.entropy_coef != 0.0, DUAL=settings.dual_clip is not None,
        PPO=settings.reverse_kl_surrogate == "ppo", NATIVE=_NATIVE,
        num_warps=shape.warps, num_stages=1, enable_fp_fusion=True,
        maxnreg=min(255, _REGISTERS // (lanes * programs)),
    )  # fmt: skip


def loss_rows(
    logits_NV: Tensor, tokens: LossTokens, settings: LossSettings, grad_NV: Tensor | None
) -> TokenTerms:
    """Every token's terms; the loss's gradient goes to grad_NV if given, which may be the logits."""
    n_rows = logits_NV.shape[0]
    terms_CN = torch.empty((7, n_rows), dtype=torch.float32, device=logits_NV.device)
    clipped_N = torch.empty(n_rows, dtype=torch.int8, device=logits_NV.device)
    reverse_weight_N = tokens.reverse_weight_N
    if reverse_weight_N is None and tokens.reverse_adv_N is not None:
        reverse_weight_N = tokens.kl_weight_N
    columns = {
        "adv": tokens.adv_N,
        "old_logp": tokens.old_logp_N,
        "pg_weight": tokens.pg_weight_N,
        "kl_weight": tokens.kl_weight_N,
        "ent_weight": tokens.ent_weight_N,
        "reverse_adv": tokens.reverse_adv_N,
        "reverse_weight": reverse_weight_N,
    }
    target = loss_target(tokens, settings)
    _launch(
        "loss_rows", logits_NV, tokens.token_ids_N, target, settings, grad_NV, columns, terms_CN, clipped_N
    )
    logp_N, entropy_N, kl_N, teacher_mass_N, student_mass_N, surrogate_N, reverse_N = terms_CN.unbind(0)
    masses = (teacher_mass_N, student_mass_N)
    return TokenTerms(logp_N, entropy_N, kl_N, *masses, clipped_N, surrogate_N, reverse_N)


def forward_kl_rows(
    logits_NV: Tensor,
    token_ids_N: Tensor,
    target: SparseTarget | Candidates,
    *,
    tail: bool,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Each row's log-probability of its token and forward KL to its target."""
    terms_CN = torch.empty((2, logits_NV.shape[0]), dtype=torch.float32, device=logits_NV.device)
    settings = LossSettings(tail=tail, temperature=temperature, kl_temperature=temperature)
    _launch("forward_kl_rows", logits_NV, token_ids_N, target, settings, None, {}, terms_CN)
    logp_N, kl_N = terms_CN.unbind(0)
    return logp_N, kl_N


def forward_kl_gradient(
    logits_NV: Tensor,
    token_ids_N: Tensor,
    target: SparseTarget | Candidates,
    *,
    tail: bool,
    temperature: float,
    dlogp_N: Tensor | None,
    dkl_N: Tensor | None,
) -> Tensor:
    """The gradient of sum(dlogp logp + dkl kl) in the logits. The statistics are computed again."""
    grad_NV = torch.empty_like(logits_NV)
    settings = LossSettings(tail=tail, temperature=temperature, kl_temperature=temperature)
    columns = {"dlogp": dlogp_N, "dkl": dkl_N}
    _launch("forward_kl_gradient", logits_NV, token_ids_N, target, settings, grad_NV, columns, None)
    return grad_NV
