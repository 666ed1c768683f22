"""What the hardware allows, by the best library call at hand: reads, copies, matrix products.

Timed in turn with every provider. Bytes are counted as STREAM counts them: each read and each write once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bench.harness.types import Ceiling


def read(logits: Tensor) -> Ceiling:
    """One read of every byte; 16-bit values are read in pairs and the sum means nothing."""
    flat = logits.flatten()
    words = flat if flat.element_size() == 4 or flat.numel() % 2 else flat.view(torch.float32)
    return Ceiling(name="read", run=lambda: words.sum(), bytes=_bytes(logits))


def copy(logits: Tensor) -> Ceiling:
    """One read and one write of every byte."""
    out = torch.empty_like(logits)
    return Ceiling(name="copy", run=lambda: out.copy_(logits), bytes=2 * _bytes(logits))


def gemm(hidden_ND: Tensor, weight_VD: Tensor) -> Ceiling:
    """The head alone: hidden @ weight.T."""
    flops = 2 * hidden_ND.shape[0] * weight_VD.numel()
    return Ceiling(name="gemm", run=lambda: hidden_ND @ weight_VD.T, flops=flops)


def three_gemms(hidden_ND: Tensor, weight_VD: Tensor) -> Ceiling:
    """The head and its two gradients, with (N, V) at hand and nothing done to it."""

    def run() -> tuple[Tensor, Tensor]:
        logits_NV = hidden_ND @ weight_VD.T
        return logits_NV @ weight_VD, logits_NV.T @ hidden_ND

    return Ceiling(name="three gemms", run=run, flops=6 * hidden_ND.shape[0] * weight_VD.numel())


def launch_or_copy(small: Tensor) -> Ceiling:
    """Of a small operation: on a GPU the smallest launch there is, on a CPU a copy."""
    if not small.is_cuda:
        return copy(small)
    word = torch.zeros(1, device=small.device)
    return Ceiling(name="launch", run=lambda: word.add_(1.0))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
