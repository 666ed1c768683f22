"""Launches that spill all the same: with which Triton, and how many bytes of a thread's stack.

Only what no fix was worth. For sm_90 that is the split kernel with an entropy gradient or ragged parts, a few
bytes outside of its loops: on an H100 it is faster than the row kernel all the same. A launch that spills
more, no more, or is no longer there fails the gate (python -m tests.kernels.offline).
"""

from __future__ import annotations

MOST_SM_90 = 16  # bytes

KNOWN_SPILLS: dict[str, dict[str, int]] = {
    "3.6.0": {
        "_stream_kernel V151936-fp16-kappa16-tokens sm_100": 8,
        "split_kernel V151936-bf16-M2-kappa16-entropy-in-place sm_90": 8,
        "split_kernel V151936-bf16-M2-kappa16-entropy-in-place sm_100": 32,
        "split_kernel V32000-fp16-M2-kappa16-merge-in-place sm_100": 8,
    },
    "3.7.1": {
        "split_kernel V151936-bf16-M2-kappa16-entropy-in-place sm_90": 16,
        "split_kernel V500000-bf16-sparse-kappa16-tail-in-place sm_90": 8,
        "split_kernel V151936-bf16-M2-kappa16-entropy-in-place sm_100": 40,
        "split_kernel V32000-fp16-M2-kappa16-merge-in-place sm_100": 16,
    },
}
