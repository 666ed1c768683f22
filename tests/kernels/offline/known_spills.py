"""Launches that spill all the same: with which Triton, and how many bytes of a thread's stack.

Only what no fix was worth: none is for sm_90, and the numbers of another version are no excuse. A launch that
spills more, no more, or is no longer there fails the gate (python -m tests.kernels.offline).
"""

from __future__ import annotations

KNOWN_SPILLS: dict[str, dict[str, int]] = {
    "3.6.0": {"_stream_kernel V151936-fp16-kappa16-tokens sm_100": 8},
}
