"""The row kernel's load without hints to the second-level cache, for the sweep: what are they worth?"""

from __future__ import annotations

import triton
import triton.language as tl

NEG_INF = tl.constexpr(float("-inf"))


@triton.jit
def load_block(
    row_ptr, block, V: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, AGAIN: tl.constexpr
):
    """AGAIN is left unused: smopd.kernels.triton.rows.load_block has a policy for each of its values."""
    offs_v = block * BLOCK + tl.arange(0, BLOCK)
    if WHOLE:
        return tl.load(row_ptr + offs_v)
    else:
        return tl.load(row_ptr + offs_v, mask=offs_v < V, other=NEG_INF)
