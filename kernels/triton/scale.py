"""Multiplies a gradient by the upstream gradient on the device. In place, a factor of 1 writes nothing."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192
PROGRAMS_PER_PROCESSOR = 8


@triton.jit
def _scale_kernel(
    out_ptr, grad_ptr, scale_ptr, n_elements: tl.int64, BLOCK: tl.constexpr, IN_PLACE: tl.constexpr
):
    scale = tl.load(scale_ptr).to(tl.float32)
    if IN_PLACE and scale == 1.0:
        return
    for block in range(tl.program_id(0).to(tl.int64), tl.cdiv(n_elements, BLOCK), tl.num_programs(0)):
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        inside = offsets < n_elements
        value = tl.load(grad_ptr + offsets, mask=inside).to(tl.float32)
        tl.store(out_ptr + offsets, (value * scale).to(out_ptr.dtype.element_ty), mask=inside)


def scale_(grad: Tensor, dloss: Tensor, out: Tensor | None = None) -> None:
    """Write grad * dloss to `out` (None: to grad). Both are dense and have the same strides."""
    if grad.numel() > 0:
        resident = PROGRAMS_PER_PROCESSOR  # programs that run on the device at once
        if grad.device.type == "cuda":
            resident *= torch.cuda.get_device_properties(grad.device).multi_processor_count
        into = grad if out is None else out
        _scale_kernel[(min(triton.cdiv(grad.numel(), BLOCK), resident),)](
            into, grad, dloss, grad.numel(),
            BLOCK=BLOCK, IN_PLACE=out is None, num_warps=8, enable_fp_fusion=True,
        )  # fmt: skip


def unserved(op: str, grad: Tensor) -> str | None:
    dense = torch.empty_like(grad, device="meta").stride() == grad.stride()
    return None if dense else "the gradient's memory has gaps"
