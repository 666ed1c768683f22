"""The three matrix products of a linear head, summed in fp32 or better, without an fp32 copy of the weight.

If a half-precision GEMM cannot return fp32, and on CPUs without bf16 instructions, the factors are converted
piece by piece. oneDNN's bf16 product on AMX (torch 2.13) reads the left factor past the end of a row and
multiplies the padding by 0, so the padding must be finite.

Shapes: N tokens, V vocabulary (or a piece of it), D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from smopd.kernels.types import compute_dtype

PIECE_BYTES = 8 << 20  # of an fp32 piece of the weight, or of the logits' gradient
ROW_ALIGN_BYTES = 128  # a cache line of a GPU, more than any GEMM needs


def padded_width(n_vocab: int, itemsize: int) -> int:
    """Return the row stride of a logits buffer, in elements."""
    unit = ROW_ALIGN_BYTES // itemsize
    return -(-n_vocab // unit) * unit


def logits_buffer(n_rows: int, n_vocab: int, like: Tensor) -> Tensor:
    """Return an uninitialized (N, V) tensor of like's dtype and device with aligned rows and zero padding."""
    buffer = like.new_empty(n_rows, padded_width(n_vocab, like.element_size()))
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
    """Compute out = dlogits @ weight in the weight's dtype."""
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
    """Compute out (+)= dlogits.T @ hidden, in the weight's dtype or, if accumulate, the compute dtype."""
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
    """Compute out (+)= left @ right."""
    if left.dtype == out.dtype:
        if accumulate:
            out.addmm_(left, right)
        else:
            torch.mm(left, right, out=out)
    elif accumulate:
        torch.addmm(out, left, right, out_dtype=out.dtype, out=out)
    else:
        torch.mm(left, right, out_dtype=out.dtype, out=out)


def _one_gemm(factor: Tensor, out: Tensor, accumulate: bool = False) -> bool:
    """Whether one GEMM of such factors computes `out` precisely and fast."""
    if factor.dtype == compute_dtype(factor.dtype) or (factor.is_cuda and torch.version.hip is None):
        return True
    rounded_once = factor.dtype == out.dtype and not accumulate
    return rounded_once and factor.dtype == torch.bfloat16 and factor.is_cpu and cpu_multiplies_bf16()


def cpu_multiplies_bf16() -> bool:
    """Whether this CPU multiplies bf16 with fp32 sums."""
    return torch.cpu._is_avx512_bf16_supported()


def _pieces(weight_VD: Tensor, n_rows: int) -> Iterator[slice]:
    """Split the weight's rows so that an fp32 copy, or (N, piece) in fp32, takes about PIECE_BYTES."""
    step = max(64, PIECE_BYTES // (4 * max(weight_VD.shape[1], n_rows, 1)))
    for start in range(0, weight_VD.shape[0], step):
        yield slice(start, min(start + step, weight_VD.shape[0]))
