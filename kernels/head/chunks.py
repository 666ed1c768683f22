"""The number of tokens whose logits a linear head holds at a time."""

from __future__ import annotations

from torch import Tensor

from smopd.kernels.head.gemm import padded_width

CHUNK_BYTES = 5 << 28  # 1.25 GiB: 4,096 rows of 152,064 in bf16, so 8,192 tokens are two chunks
CHUNK_BYTES_CPU = 160 << 20  # at N 2048, D 512, V 151936 in fp32 the peak is under a tenth of eager's
ROW_UNIT, ROW_UNIT_CPU = 128, 16  # a chunk has a multiple of this many rows if the budget allows it


def rows_per_chunk(hidden_ND: Tensor, n_vocab: int, chunk_bytes: int | None) -> int:
    """Return how many rows of logits fit into chunk_bytes (None: the device's default), at least one."""
    on_cpu, itemsize = hidden_ND.device.type == "cpu", hidden_ND.element_size()
    budget = chunk_bytes or (CHUNK_BYTES_CPU if on_cpu else CHUNK_BYTES)
    rows = max(budget // (padded_width(n_vocab, itemsize) * itemsize), 1)
    unit = ROW_UNIT_CPU if on_cpu else ROW_UNIT
    return rows if rows < unit else rows // unit * unit


def row_chunks(hidden_ND: Tensor, n_vocab: int, chunk_bytes: int | None) -> list[tuple[int, int]]:
    """Split the rows of a head so that the logits of each chunk fit into chunk_bytes."""
    unit = ROW_UNIT_CPU if hidden_ND.device.type == "cpu" else ROW_UNIT
    return row_blocks(hidden_ND.shape[0], rows_per_chunk(hidden_ND, n_vocab, chunk_bytes), unit)


def row_blocks(n_rows: int, most: int, unit: int) -> list[tuple[int, int]]:
    """Split the rows into the fewest nearly equal blocks of at most `most` rows: (start, stop) of each.

    All blocks but the last have a multiple of `unit` rows if most >= unit, so that columns start at 16 bytes.
    """
    unit = unit if most >= unit else 1
    n_blocks = max(-(-n_rows // (max(most, 1) // unit * unit)), 1)
    step = max(-(-n_rows // (n_blocks * unit)), 1) * unit
    return [(start, min(start + step, n_rows)) for start in range(0, max(n_rows, 1), step)]
