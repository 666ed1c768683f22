"""Where the Triton tests run: natively on a GPU, elsewhere in Triton's interpreter.

A test module that imports this is skipped where neither is to be had.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton", reason="Triton is not installed")

import triton

from smopd.kernels.triton import topk

if not torch.cuda.is_available() and isinstance(topk._stream_kernel, triton.JITFunction):
    pytest.skip("no GPU, and the kernels were imported without TRITON_INTERPRET", allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
gpu = pytest.mark.gpu
needs_cuda = pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
