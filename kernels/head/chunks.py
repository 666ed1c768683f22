"""How many tokens a linear head works on at a time.

Shapes: N tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from smopd.kernels.head.gemm import padded_width

# On an accelerator: 1.25 GiB holds 4,096 rows of 152,064 in bf16, so 8,192 tokens are two chunks.
CHUNK_BYTES = 5 << 28
# On a CPU: the peak at N = 2048, D = 512, V = 151936 in fp32 stays under a tenth of eager's.
CHUNK_BYTES_CPU = 160 << 20
ROW_UNIT, ROW_UNIT_CPU = 128, 16  # rows of a chunk are a multiple of this where the budget allows it


def rows_per_chunk(hidden_ND: Tensor, n_vocab: int, chunk_bytes: int | None) -> int:
    """How many rows of logits fit into chunk_bytes (None: the device's default); at least one."""
    on_cpu, itemsize = hidden_ND.device.type == "cpu", hidden_ND.element_size()
    budget = chunk_bytes or (CHUNK_BYTES_CPU if on_cpu else CHUNK_BYTES)
    rows = max(budget // (padded_width(n_vocab, itemsize) * itemsize), 1)
    unit = ROW_UNIT_CPU if on_cpu else ROW_UNIT
    return rows if rows < unit else rows // unit * unit


def row_blocks(n_rows: int, most: int, unit: int) -> list[tuple[int, int]]:
    """(start, stop) of as few blocks of at most `most` rows as it takes, at least one, nearly equal.

    All but the last are a multiple of unit where `most` is at least that, so that columns start at 16 bytes.
    On an H200 equal chunks beat those that fill cuBLAS's waves of tiles best (docs/kernels.md).
    """
    unit = unit if most >= unit else 1
    n_blocks = max(-(-n_rows // (max(most, 1) // unit * unit)), 1)
    step = max(-(-n_rows // (n_blocks * unit)), 1) * unit
    return [(start, min(start + step, n_rows)) for start in range(0, max(n_rows, 1), step)]
