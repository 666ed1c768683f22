"""How many tokens a linear form works on at a time: on a GPU by its processors, always within the budget."""

from __future__ import annotations

import math

import pytest
import torch

from smopd.kernels.head import chunks
from smopd.kernels.head.loss import _scaled
from smopd.kernels.ops.loss import scale_

QWEN = 151_936
MOST = chunks.CHUNK_BYTES // (2 * QWEN)  # rows in bf16


def waves(blocks, n_hidden: int) -> int:
    """Of dX, in tiles of 128 x 256 on 132 processors."""
    return sum(
        math.ceil(math.ceil((stop - start) / 128) * math.ceil(n_hidden / 256) / 132) for start, stop in blocks
    )


@pytest.mark.parametrize(
    ("n_hidden", "sizes", "fewest"),
    [
        (1536, [2816, 2816, 2560], 3),
        (2048, [4224, 3968], 4),
        (3584, [3584, 3584, 1024], 7),
        (4096, [4224, 3968], 8),
    ],
)
def test_no_processor_waits_for_a_short_last_wave(n_hidden: int, sizes: list[int], fewest: int) -> None:
    """8192 tokens: as few waves of dX as all of them at once would have, and 63 or 64 of the row kernel."""
    blocks = chunks.gpu_steps(8192, MOST, n_hidden, 132)
    assert [stop - start for start, stop in blocks] == sizes
    assert waves(blocks, n_hidden) == fewest == waves([(0, 8192)], n_hidden)
    assert sum(math.ceil(size / 132) for size in sizes) <= 64
    assert chunks.gpu_steps(8192, 8192, n_hidden, 132) == ((0, 8192),)


@pytest.mark.parametrize("most", [1, 5, 127, 128, 300, 4416, 10**6])
def test_blocks_are_all_rows_in_order_within_the_budget(most: int) -> None:
    for n_rows in (1, 127, 128, 129, 4300, 20_001):
        for n_hidden, n_processors in ((6, 132), (2048, 108), (5120, 148)):
            blocks = chunks.gpu_steps(n_rows, most, n_hidden, n_processors)
            assert [start for start, _ in blocks] == [0, *(stop for _, stop in blocks[:-1])]
            assert blocks[-1][1] == n_rows and all(0 < stop - start <= most for start, stop in blocks)
            if most >= 128:  # columns of the tokens start at 16 bytes in every block
                assert all(start % 128 == 0 for start, _ in blocks)


@pytest.mark.parametrize(("device", "sizes"), [("cpu", [4096, 4096]), ("meta", [4224, 3968])])
def test_a_cpu_and_an_accelerator_are_cut_in_their_own_way(device: str, sizes: list[int]) -> None:
    """The buffer is for the largest block; a row is 1024 columns of bf16."""
    hidden_ND = torch.empty(8192, 2048, dtype=torch.bfloat16, device=device)
    blocks, buffer_NV = chunks.row_blocks(8192, hidden_ND, 1000, 4400 * 2048)
    assert [stop - start for start, stop in blocks] == sizes
    assert buffer_NV.shape == (sizes[0], 1000) and buffer_NV.stride(0) == 1024


def test_ranks_cut_alike_whatever_they_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the widest shard, and without asking for the device's processors."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", None)
    hidden_ND = torch.empty(8192, 2048, dtype=torch.bfloat16, device="meta")
    cuts = [
        chunks.row_blocks(8192, hidden_ND, n_vocab, 1 << 24, widest=1100, alone=False)[0]
        for n_vocab in (900, 1100)
    ]
    assert cuts[0] == cuts[1] == list(chunks.gpu_steps(8192, (1 << 24) // (2 * 1152), 2048, 132))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("keep", [False, True])
def test_a_kept_gradient_is_scaled_and_rounded_once(keep: bool, device: str) -> None:
    sums = torch.randn(50, 9, generator=torch.Generator().manual_seed(0)).to(device)
    before, dloss = sums.clone(), torch.tensor(0.3, device=device)
    serve = chunks.Serving(scale_=scale_)
    got = _scaled(sums, dloss, torch.bfloat16, serve, keep=keep)
    assert got.dtype == torch.bfloat16 and torch.equal(got, (before * 0.3).bfloat16())
    assert not keep or torch.equal(sums, before)
