"""A gradient times the upstream gradient, on the device: programs that return early where that is 1."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192
PROGRAMS_PER_PROCESSOR = 8


@triton.jit
def _scale_kernel(grad_ptr, scale_ptr, n_elements: tl.int64, BLOCK: tl.constexpr):
    scale = tl.load(scale_ptr).to(tl.float32)
    if scale == 1.0:
        return
    for block in range(tl.program_id(0).to(tl.int64), tl.cdiv(n_elements, BLOCK), tl.num_programs(0)):
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        inside = offsets < n_elements
        value = tl.load(grad_ptr + offsets, mask=inside).to(tl.float32)
        tl.store(grad_ptr + offsets, (value * scale).to(grad_ptr.dtype.element_ty), mask=inside)


def scale_(grad: Tensor, dloss: Tensor) -> None:
    """grad *= dloss; grad is dense, whatever its shape."""
    if grad.numel() > 0:
        grid = (min(triton.cdiv(grad.numel(), BLOCK), _resident(grad.device)),)
        _scale_kernel[grid](grad, dloss, grad.numel(), BLOCK=BLOCK, num_warps=8)


def _resident(device: torch.device) -> int:
    """Programs that are on the device at once."""
    if device.type != "cuda":
        return PROGRAMS_PER_PROCESSOR
    return PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


def unserved(op: str, grad: Tensor) -> str | None:
    dense = torch.empty_like(grad, device="meta").stride() == grad.stride()
    return None if dense else "the gradient's memory has gaps"
