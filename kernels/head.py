"""The logits and gradients of a linear head, in chunks of rows and without an fp32 copy of the whole weight.

Products are accumulated in fp32 or better. If a half-precision GEMM cannot return fp32, and on CPUs without
bf16 instructions (_one_gemm is False), the factors are converted to fp32 piece by piece. With AMX, oneDNN's
bf16 product (torch 2.13) multiplies the padding behind each left row by 0, so the padding must be finite.

Shapes: N tokens, V vocabulary (or a piece of it), D hidden size.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from smopd.kernels.types import compute_dtype

CHUNK_BYTES = 5 << 28  # 1.25 GiB: 8,192 rows of 152,064 bf16 logits are two chunks
CHUNK_BYTES_CPU = 160 << 20  # peak memory is under a tenth of eager's at N 2048, D 512, V 151936, fp32
ROW_UNIT, ROW_UNIT_CPU = 128, 16  # a chunk's rows are a multiple of this if the budget allows it
PIECE_BYTES = 8 << 20  # size of an fp32 piece of the weight or of the logits' gradient
ROW_ALIGN_BYTES = 128  # a GPU's cache line, which is more than any GEMM needs


def rows_per_chunk(hidden_ND: Tensor, n_vocab: int, chunk_bytes: int | None) -> int:
    """Return how many rows of logits fit into chunk_bytes (None: the device's default), but at least 1."""
    on_cpu, itemsize = hidden_ND.device.type == "cpu", hidden_ND.element_size()
    budget = chunk_bytes or (CHUNK_BYTES_CPU if on_cpu else CHUNK_BYTES)
    rows = max(budget // (_padded_width(n_vocab, itemsize) * itemsize), 1)
    unit = ROW_UNIT_CPU if on_cpu else ROW_UNIT
    return rows if rows < unit else rows // unit * unit


def logit_chunks(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, chunk_bytes: int | None
) -> Iterator[tuple[slice, Tensor]]:
    """Yield the rows (a slice) and logits of each chunk, at least one. All chunks share one buffer."""
    n_vocab, unit = weight_VD.shape[0], ROW_UNIT_CPU if hidden_ND.device.type == "cpu" else ROW_UNIT
    blocks = row_blocks(hidden_ND.shape[0], rows_per_chunk(hidden_ND, n_vocab, chunk_bytes), unit)
    buffer_NV = logits_buffer(max(rows.stop - rows.start for rows in blocks), n_vocab, hidden_ND)
    for rows in blocks:
        logits_NV = buffer_NV[: rows.stop - rows.start]
        logits_into(logits_NV, hidden_ND[rows], weight_VD, bias_V)
        yield rows, logits_NV


def row_blocks(n_rows: int, most: int, unit: int) -> list[slice]:
    """Split rows into the fewest blocks of at most `most` rows that `unit` allows, of nearly the same size.

    There is at least one. If most >= unit, each but the last has a multiple of `unit` rows, for alignment.
    """
    unit = unit if most >= unit else 1
    n_blocks = max(-(-n_rows // (max(most, 1) // unit * unit)), 1)
    step = max(-(-n_rows // (n_blocks * unit)), 1) * unit
    return [slice(start, min(start + step, n_rows)) for start in range(0, max(n_rows, 1), step)]


def _padded_width(n_vocab: int, itemsize: int) -> int:
    unit = ROW_ALIGN_BYTES // itemsize
    return -(-n_vocab // unit) * unit


def logits_buffer(n_rows: int, n_vocab: int, like: Tensor) -> Tensor:
    """Return an uninitialized (N, V) tensor with like's dtype and device, aligned rows and zero padding."""
    buffer = like.new_empty(n_rows, _padded_width(n_vocab, like.element_size()))
    buffer[:, n_vocab:] = 0.0
    return buffer[:, :n_vocab]


def logits_into(out_NV: Tensor, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> None:
    if _one_gemm(hidden_ND, out_NV):
        if bias_V is None:
            torch.mm(hidden_ND, weight_VD.T, out=out_NV)
        else:
            torch.addmm(bias_V, hidden_ND, weight_VD.T, out=out_NV)
        return
    wide_ND = hidden_ND.float()
    for piece in _pieces(weight_VD, hidden_ND.shape[0]):
        wide_NV = wide_ND @ weight_VD[piece].float().T
        out_NV[:, piece] = wide_NV if bias_V is None else wide_NV.add_(bias_V[piece])


def hidden_gradient_into(out_ND: Tensor, dlogits_NV: Tensor, weight_VD: Tensor) -> None:
    """Compute out = dlogits @ weight, with `out` in the weight's dtype."""
    if _one_gemm(dlogits_NV, out_ND):
        torch.mm(dlogits_NV, weight_VD, out=out_ND)
        return
    wide_ND = torch.empty_like(out_ND, dtype=torch.float32)
    for piece in _pieces(weight_VD, dlogits_NV.shape[0]):
        _product_into(wide_ND, dlogits_NV[:, piece].float(), weight_VD[piece].float(), piece.start > 0)
    out_ND.copy_(wide_ND)


def weight_gradient_into(
    out_VD: Tensor, dlogits_NV: Tensor, hidden_ND: Tensor, *, accumulate: bool = False
) -> None:
    """Write or add dlogits.T @ hidden to `out`, which has the weight's (several chunks: compute) dtype."""
    if _one_gemm(hidden_ND, out_VD, accumulate):
        _product_into(out_VD, dlogits_NV.T, hidden_ND, accumulate)
        return
    wide_ND = hidden_ND.float()
    for piece in _pieces(out_VD, hidden_ND.shape[0]):
        wide_VN = dlogits_NV[:, piece].float().T
        if out_VD.dtype == wide_ND.dtype:
            _product_into(out_VD[piece], wide_VN, wide_ND, accumulate)
        else:
            out_VD[piece] = wide_VN @ wide_ND


def _product_into(out: Tensor, left: Tensor, right: Tensor, accumulate: bool) -> None:
    options: Any = {} if left.dtype == out.dtype else {"out_dtype": out.dtype}
    if accumulate:
        torch.addmm(out, left, right, out=out, **options)
    else:
        torch.mm(left, right, out=out, **options)


def _one_gemm(factor: Tensor, out: Tensor, accumulate: bool = False) -> bool:
    """Return whether a single GEMM of factors like `factor` computes `out` precisely and fast."""
    if factor.dtype == compute_dtype(factor.dtype) or (factor.is_cuda and torch.version.hip is None):
        return True
    rounded_once = factor.dtype == out.dtype and not accumulate
    return rounded_once and factor.dtype == torch.bfloat16 and factor.is_cpu and cpu_multiplies_bf16()


def cpu_multiplies_bf16() -> bool:
    return torch.cpu._is_avx512_bf16_supported()


def _pieces(weight_VD: Tensor, n_rows: int) -> Iterator[slice]:
    """Yield vocabulary slices. An fp32 tensor (slice, D) or (N, slice) has at most about PIECE_BYTES."""
    step = max(64, PIECE_BYTES // (4 * max(weight_VD.shape[1], n_rows, 1)))
    for start in range(0, weight_VD.shape[0], step):
        yield slice(start, min(start + step, weight_VD.shape[0]))
