"""Hardware limits measured by library calls: reads, copies, matrix products.

They are timed in turn with every provider. As in STREAM, each byte read and each byte written counts once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bench.harness.types import Ceiling


def read(logits: Tensor) -> Ceiling:
    """Read every byte once. 16-bit values are read in pairs as fp32, so their sum is meaningless."""
    flat = logits.flatten()
    words = flat if flat.element_size() == 4 or flat.numel() % 2 else flat.view(torch.float32)
    return Ceiling(name="read", run=lambda: words.sum(), bytes=_bytes(logits))


def copy(logits: Tensor) -> Ceiling:
    """Read and write every byte once."""
    out = torch.empty_like(logits)
    return Ceiling(name="copy", run=lambda: out.copy_(logits), bytes=2 * _bytes(logits))


def gemm(hidden_ND: Tensor, weight_VD: Tensor) -> Ceiling:
    """Compute hidden @ weight.T."""
    flops = 2 * hidden_ND.shape[0] * weight_VD.numel()
    return Ceiling(name="gemm", run=lambda: hidden_ND @ weight_VD.T, flops=flops)


def three_gemms(hidden_ND: Tensor, weight_VD: Tensor) -> Ceiling:
    """Compute the logits of the head and its two gradients, with (N, V) in memory."""

    def run() -> tuple[Tensor, Tensor]:
        logits_NV = hidden_ND @ weight_VD.T
        return logits_NV @ weight_VD, logits_NV.T @ hidden_ND

    return Ceiling(name="three gemms", run=run, flops=6 * hidden_ND.shape[0] * weight_VD.numel())


def launch_or_copy(small: Tensor) -> Ceiling:
    """Return the limit of a small operation: a minimal launch on a GPU, a copy on a CPU."""
    if not small.is_cuda:
        return copy(small)
    word = torch.zeros(1, device=small.device)
    return Ceiling(name="launch", run=lambda: word.add_(1.0))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
