"""How many tokens a linear form works on at a time: always within the budget."""

from __future__ import annotations

import pytest
import torch

from smopd.kernels.head import chunks
from smopd.kernels.head.loss import _scaled
from smopd.kernels.ops.loss import scale_

QWEN = 151_936
MOST = chunks.CHUNK_BYTES // (2 * QWEN)  # rows in bf16


def sizes(n_rows: int, most: int) -> list[int]:
    return [stop - start for start, stop in chunks.gpu_steps(n_rows, most)]


def test_the_default_budget_holds_half_of_8192_tokens() -> None:
    assert sizes(8192, MOST) == [4096, 4096] and sizes(8192, 8192) == [8192]
    assert sizes(8193, MOST) == [4224, 3969] and sizes(0, MOST) == []


@pytest.mark.parametrize("most", [1, 5, 127, 128, 300, 4416, 10**6])
def test_blocks_are_all_rows_in_order_within_the_budget(most: int) -> None:
    for n_rows in (1, 127, 128, 129, 4300, 20_001):
        blocks = chunks.gpu_steps(n_rows, most)
        assert [start for start, _ in blocks] == [0, *(stop for _, stop in blocks[:-1])]
        assert blocks[-1][1] == n_rows and all(0 < stop - start <= most for start, stop in blocks)
        if most >= 128:  # columns of the tokens start at 16 bytes in every block
            assert all(start % 128 == 0 for start, _ in blocks)


@pytest.mark.parametrize(("device", "largest"), [("cpu", 2736), ("meta", 2816)])
def test_a_cpu_and_an_accelerator_are_cut_in_their_own_way(device: str, largest: int) -> None:
    """The buffer is for the largest block; a row is 1024 columns of bf16."""
    hidden_ND = torch.empty(8192, 2048, dtype=torch.bfloat16, device=device)
    blocks, buffer_NV = chunks.row_blocks(8192, hidden_ND, 1000, 3000 * 2048)
    assert max(stop - start for start, stop in blocks) == largest and len(blocks) == 3
    assert buffer_NV.shape == (largest, 1000) and buffer_NV.stride(0) == 1024


def test_ranks_cut_alike() -> None:
    """By the widest shard."""
    hidden_ND = torch.empty(8192, 2048, dtype=torch.bfloat16, device="meta")
    cuts = [chunks.row_blocks(8192, hidden_ND, n_vocab, 1 << 24, widest=1100)[0] for n_vocab in (900, 1100)]
    assert cuts[0] == cuts[1] == chunks.gpu_steps(8192, (1 << 24) // (2 * 1152))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("keep", [False, True])
def test_a_kept_gradient_is_scaled_and_rounded_once(keep: bool, device: str) -> None:
    sums = torch.randn(50, 9, generator=torch.Generator().manual_seed(0)).to(device)
    before, dloss = sums.clone(), torch.tensor(0.3, device=device)
    serve = chunks.Serving(scale_=scale_)
    got = _scaled(sums, dloss, torch.bfloat16, serve, keep=keep)
    assert got.dtype == torch.bfloat16 and torch.equal(got, (before * 0.3).bfloat16())
    assert not keep or torch.equal(sums, before)
