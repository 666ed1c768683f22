"""Launches that spill all the same: with which Triton, and how many bytes of a thread's stack.

Only what no fix was worth: the split kernel, a few bytes outside of its loops up to Triton 3.7. From 3.8 on
its parts no longer fit the registers; it is not timed there. A launch that spills more, no more, or is gone
fails the gate.
"""

from __future__ import annotations

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
    "3.8.0": {
        "split_kernel V151936-bf16-M2-kappa16-in-place sm_80": 40,
        "split_kernel V151936-bf16-M2-kappa16-entropy-in-place sm_80": 40,
        "split_kernel V151936-bf16-M2-kappa16-merge-tail-in-place sm_80": 144,
        "split_kernel V151936-bf16-M2-kappa16-in-place sm_90": 64,
        "split_kernel V151936-bf16-M2-kappa16-entropy-in-place sm_90": 56,
        "split_kernel V151936-bf16-M2-kappa16-merge-tail-in-place sm_90": 176,
        "split_kernel V500000-bf16-sparse-kappa16-tail-in-place sm_90": 192,
        "split_kernel V151936-bf16-M2-kappa16-entropy-in-place sm_100": 16,
        "split_kernel V151936-bf16-M2-kappa16-merge-tail-in-place sm_100": 96,
        "split_kernel V151936-fp32-M2-kappa16-merge-tail-in-place sm_100": 56,
        "split_kernel V32000-fp16-M2-kappa16-merge-in-place sm_100": 40,
        "split_kernel V32000-bf16-none-kappa64-in-place sm_100": 16,
    },
    "3.9.0": {
        "split_kernel V151936-bf16-M2-kappa16-in-place sm_80": 40,
        "split_kernel V151936-bf16-M2-kappa16-entropy-in-place sm_80": 40,
        "split_kernel V151936-bf16-M2-kappa16-merge-tail-in-place sm_80": 152,
        "_target_kernel V151936-bf16-sparse-kappa512-tail-entropy-twoT-in-place sm_80": 8,
        "_mixture_kernel M1-kappa64-merge-int64-by_token sm_90": 8,
        "split_kernel V151936-bf16-M2-kappa16-in-place sm_90": 40,
        "split_kernel V151936-bf16-M2-kappa16-entropy-in-place sm_90": 56,
        "split_kernel V151936-bf16-M2-kappa16-merge-tail-in-place sm_90": 160,
        "split_kernel V500000-bf16-sparse-kappa16-tail-in-place sm_90": 168,
        "split_kernel V151936-bf16-M2-kappa16-entropy-in-place sm_100": 24,
        "split_kernel V151936-bf16-M2-kappa16-merge-tail-in-place sm_100": 88,
        "split_kernel V151936-fp32-M2-kappa16-merge-tail-in-place sm_100": 56,
        "split_kernel V32000-fp16-M2-kappa16-merge-in-place sm_100": 64,
        "split_kernel V32000-bf16-none-kappa64-in-place sm_100": 24,
    },
}
