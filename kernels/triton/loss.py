"""Launchers of the loss kernels: the target kernel, then the row kernel or the split kernel."""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from smopd.kernels.tokens import reverse_weight
from smopd.kernels.triton.mixture import MAX_CANDIDATES
from smopd.kernels.triton.row_kernel import row_kernel
from smopd.kernels.triton.rows import LOG2E
from smopd.kernels.triton.split_kernel import POISON, WORDS, split_kernel
from smopd.kernels.triton.target import MAX_SUPPORT, RowTargets, n_slots, row_targets
from smopd.kernels.triton.terms import COLUMNS, PPO
from smopd.kernels.types import LossSettings, LossTokens, TokenTerms, loss_target

_NATIVE = isinstance(row_kernel, JITFunction)  # otherwise it runs in Triton's interpreter
# Hash in this order: a kernel's key in Triton's cache depends on which of the two is hashed first.
_KEYS = [kernel.cache_key for kernel in (row_kernel, split_kernel)] if _NATIVE else []
_WARP = 32
_REGISTERS = 1 << 16  # registers of an SM. Without maxnreg, ptxas would spill to fit one more program
_VECTOR_BYTES = 16
_MAX_BLOCKS = 64  # upper limit of blocks per row, because skipped_NL has a bit for each
_MAX_ELEMENTS = 16  # elements per lane and block
_SLOTS = 128  # slots of a target that one warp can compare without spills
MAX_VOCAB = _MAX_BLOCKS * 16 * _WARP * _MAX_ELEMENTS
_SPLIT_LANES, _SPLIT_REGISTERS, _SPLIT_PROGRAMS = 128, 128, 4  # per program, per lane, per SM
_SPLIT_VECTORS = 19  # upper limit of 16-byte vectors per lane. Each needs 4 registers
_SPLIT_AHEAD = 1.5  # how far ahead a part is prefetched, in programs per SM
_SPLIT_REPEATS = 2  # vectors per lane and block
_SPLIT_SLOTS, _SPLIT_TAIL_SLOTS = 32, 16  # limits of a target's slots, without and with tail: one warp polls
_MAX_HELD = 8 * _WARP * 16 * 3  # longest row that the row kernel holds in registers
_SPLIT_UNIT = 8  # a part is a multiple of this many vectors (128 bytes)


def _configuration(n_vocab: int, dtype: torch.dtype, slots: int, *, aligned: bool) -> tuple[int, int, int]:
    """Return warps, elements per lane and block, and the number of blocks held in registers.

    Short rows are held whole. Longer rows use 16 warps with 128 registers per lane. Of these registers, 24
    (32 for fp32) hold the row's end.
    """
    elements, held = (8, 4) if dtype == torch.float32 else (16, 3)
    if not aligned:
        elements, held = 8, 2  # unaligned elements need more registers
    enough = (w for w in (1, 4, 8) if n_vocab <= w * _WARP * elements * held and slots <= w * _SLOTS)
    warps = next(enough, 16)
    while n_vocab > _MAX_BLOCKS * warps * _WARP * elements and elements < _MAX_ELEMENTS:
        elements, held = 2 * elements, 2
    return warps, elements, held


def _aligned_elements(rows_NV: Tensor) -> int:
    """Return the number of elements in the widest aligned access to all rows, at most 16 bytes.

    Memory from other libraries may start anywhere, so addresses matter. "meta" tensors have only an offset.
    """
    address, size = rows_NV.data_ptr(), rows_NV.element_size()
    return math.gcd(_VECTOR_BYTES // size, address // size, rows_NV.storage_offset(), rows_NV.stride(0))


def unserved(
    op: str, tensor: Tensor, *, n_support: int = 0, n_pooled: int = 0, n_vocab: int | None = None
) -> str | None:
    """Return why this backend rejects the call, or None. n_vocab is given if `tensor` is not the logits."""
    n_vocab = tensor.shape[1] if n_vocab is None else n_vocab
    if n_vocab > MAX_VOCAB:
        return f"V is {n_vocab}, expected at most {MAX_VOCAB}"
    if n_support > MAX_SUPPORT:
        return f"the target has {n_support} entries, expected at most {MAX_SUPPORT}"
    if n_pooled > MAX_CANDIDATES:
        return f"M * S is {n_pooled}, expected at most {MAX_CANDIDATES}"
    return None


def _parts(n_vocab: int, consecutive: int) -> dict[str, int]:
    """Split a row into the fewest parts that fit a program's registers. Only the last part can be shorter.

    Return the arguments of split_kernel that say how its programs share a row.
    """
    vectors = triton.cdiv(n_vocab, consecutive)
    n = triton.cdiv(vectors, _SPLIT_LANES * _SPLIT_VECTORS)
    size = triton.cdiv(vectors, n * _SPLIT_UNIT) * _SPLIT_UNIT * consecutive
    n = triton.cdiv(n_vocab, size)
    strides = triton.cdiv(size, _SPLIT_LANES * consecutive)
    blocks = triton.cdiv(strides, _SPLIT_REPEATS)
    shortest = n_vocab - (n - 1) * size
    whole = min(shortest // (_SPLIT_REPEATS * _SPLIT_LANES * consecutive), blocks - 1)
    shared = {"PARTS": n, "P": triton.next_power_of_2(n), "PART": size, "BLOCKS": blocks, "WHOLE": whole}
    return shared | {"TAIL_R": strides - (blocks - 1) * _SPLIT_REPEATS}


def _splits(logits_NV: Tensor, slots: int, *, tail: bool, two: bool) -> bool:
    """Return whether to use the split kernel. It is meant for rows that the row kernel would read twice.

    It is not used for variants that spill (two temperatures, or fp16 logits with a tail) or are slower (long
    targets), nor before sm_80. A row must not have more parts than a warp polls or the GPU runs at once.
    """
    n_vocab, size = logits_NV.shape[1], logits_NV.element_size()
    if n_vocab <= _MAX_HELD or two:
        return False
    if slots > (_SPLIT_TAIL_SLOTS if tail else _SPLIT_SLOTS) or (tail and logits_NV.dtype == torch.float16):
        return False
    most = _WARP
    if logits_NV.is_cuda:
        facts = torch.cuda.get_device_properties(logits_NV.device)
        most = min(most, _SPLIT_PROGRAMS * facts.multi_processor_count) if facts.major >= 8 else 0
    return _parts(n_vocab, _VECTOR_BYTES // size)["PARTS"] <= most


def _columns(tokens: LossTokens, settings: LossSettings) -> tuple[int, list[Tensor | None]]:
    """Return `there`, the bit mask of terms.py, and the columns in the order of COLUMNS.

    An absent column is replaced by adv_N to avoid another compiled variant. Only reverse_adv stays None.
    """
    named = {name: getattr(tokens, f"{name}_N") for name in COLUMNS}
    if tokens.reverse_adv_N is not None:
        named["reverse_weight"] = reverse_weight(tokens)
    columns = [None if column is None else column.float().contiguous() for column in named.values()]
    there = sum(1 << number for number, column in enumerate(columns) if column is not None)
    there |= PPO if settings.reverse_kl_surrogate == "ppo" else 0
    optional = COLUMNS.index("reverse_adv")
    given = [columns[0] if column is None else column for column in columns]
    given[optional] = columns[optional]
    return there, given


def loss_rows(
    logits_NV: Tensor,
    tokens: LossTokens,
    settings: LossSettings,
    grad_NV: Tensor | None,
    *,
    entropy: bool = True,
) -> TokenTerms:
    """See kernels.reference.loss.loss_rows. The entropy is always computed, as the reads hide its cost."""
    n_rows, n_vocab = logits_NV.shape
    terms_CN = torch.empty((7, n_rows), dtype=torch.float32, device=logits_NV.device)
    clipped_N = torch.empty(n_rows, dtype=torch.int8, device=logits_NV.device)
    logp_N, entropy_N, kl_N, teacher_mass_N, student_mass_N, surrogate_N, reverse_N = terms_CN.unbind(0)
    masses = (teacher_mass_N, student_mass_N)
    terms = TokenTerms(logp_N, entropy_N, kl_N, *masses, clipped_N, surrogate_N, reverse_N)
    if n_rows == 0:
        return terms
    target = loss_target(tokens, settings)
    consecutive = _aligned_elements(logits_NV)
    if grad_NV is not None:
        consecutive = min(consecutive, _aligned_elements(grad_NV))
    slots = n_slots(target)
    aligned = consecutive * logits_NV.element_size() == _VECTOR_BYTES
    two = target is not None and settings.temperature != settings.kl_temperature
    there, columns = _columns(tokens, settings)
    inputs = (logits_NV, grad_NV, tokens.token_ids_N.contiguous())
    scalars = (
        there, n_rows, logits_NV.stride(0) // consecutive,
        0 if grad_NV is None else grad_NV.stride(0) // consecutive,
        LOG2E.value / settings.temperature,
        LOG2E.value / (settings.kl_temperature if two else settings.temperature),
        1.0 / settings.temperature, 1.0 / settings.kl_temperature,
        1.0 - settings.clip_low, 1.0 + settings.clip_high, settings.dual_clip or math.inf,
        settings.opd_coef, settings.entropy_coef,
    )  # fmt: skip
    options = {
        "V": n_vocab, "K": slots, "C": consecutive, "NATIVE": _NATIVE,
        "CURVED": grad_NV is not None and settings.entropy_coef != 0.0,
        "num_stages": 1, "enable_fp_fusion": True,
    }  # fmt: skip

    def targets(lanes: int, repeats: int, part: int | None = None) -> tuple[Tensor | None, ...]:
        """Return the fields of RowTargets, or Nones without a target."""
        if target is None:
            return (None,) * len(RowTargets._fields)
        return row_targets(target, n_vocab, lanes, repeats, consecutive, tail=settings.tail, part=part)

    if (
        grad_NV is not None
        and aligned
        and _splits(logits_NV, slots, tail=target is not None and settings.tail, two=two)
    ):
        parts, lanes = _parts(n_vocab, consecutive), _SPLIT_LANES
        ready = targets(lanes, _SPLIT_REPEATS, parts["PART"])
        n_words = n_rows * (parts["PARTS"] * WORDS + 2 * slots)
        exchange = torch.full((n_words,), POISON.value, dtype=torch.int32, device=logits_NV.device)
        gpu = torch.cuda.get_device_properties(logits_NV.device) if _NATIVE else None
        ahead = int(_SPLIT_AHEAD * gpu.multi_processor_count) if gpu is not None and gpu.major >= 9 else 0
        for phase in (0,) if _NATIVE else (1, 2):
            split_kernel[(n_rows * parts["PARTS"],)](
                *inputs, *ready, *columns, terms_CN, clipped_N, exchange, *scalars, **options, **parts,
                R=_SPLIT_REPEATS, L=lanes, PHASE=phase, AHEAD=ahead,
                num_warps=lanes // _WARP, maxnreg=_SPLIT_REGISTERS,
            )  # fmt: skip
        return terms
    warps, elements, most = _configuration(n_vocab, logits_NV.dtype, slots, aligned=aligned)
    lanes = warps * _WARP
    # Hold at least two blocks, as the last may be partial. A second softmax needs the registers of one block.
    blocks = triton.cdiv(n_vocab, lanes * elements)
    last = min(blocks, 2 if grad_NV is None else max(2, most - two))
    ahead = 2 if blocks > last > 2 else 1
    # Without a gradient, two programs fit on an SM.
    programs = 2 if grad_NV is None and not two and slots <= 64 else 1
    repeats = elements // consecutive
    row_kernel[(n_rows,)](
        *inputs, *targets(lanes, repeats), *columns, terms_CN, clipped_N, *scalars, **options,
        R=repeats, L=lanes, LAST=last, AHEAD=ahead, TWO=two,
        UNROLL=1 if logits_NV.element_size() == 2 and programs == 2 else ahead + 1,
        num_warps=warps, maxnreg=min(255, _REGISTERS // (lanes * programs)),
    )  # fmt: skip
    return terms
