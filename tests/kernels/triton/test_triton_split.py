"""The split kernel's own: how a row is shared, and the same bits whatever runs beside it on a GPU.

Its results are held to float64 as the backend "triton split" in tests/kernels/conformance.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.kernels.triton.device import DEVICE, gpu, needs_cuda

# isort: split
from smopd.kernels.triton import loss
from smopd.kernels.types import LossSettings, LossTokens, TokenTerms
from tests.kernels import backends

SETTINGS = {
    "paper": LossSettings(merge=False, tail=False),
    "tail": LossSettings(),
    "entropy": LossSettings(entropy_coef=0.1),
}
SIZES = ((2048, 151_936), (33, 32_000), (1, 262_144), (12_000, 50_304))


@pytest.mark.parametrize("consecutive", [4, 8])
def test_parts_are_a_row(consecutive: int) -> None:
    """Each fits its registers, in whole vectors; a block that counts as whole is whole in every part."""
    block = loss._SPLIT_REPEATS * loss._SPLIT_LANES * consecutive
    for n_vocab in (*range(12_289, 12_400), 32_000, 50_304, 128_256, 151_936, 152_064, 262_144, 524_288):
        parts = loss._parts(n_vocab, consecutive)
        last = n_vocab - (parts.n - 1) * parts.size
        assert 0 < last <= parts.size and parts.size % (8 * consecutive) == 0
        held = (parts.blocks - 1) * block + parts.last_repeats * block // loss._SPLIT_REPEATS
        assert parts.size <= held <= loss._SPLIT_VECTORS * loss._SPLIT_LANES * consecutive
        assert parts.whole * block <= last and parts.whole < parts.blocks


@pytest.mark.parametrize(
    ("dtype", "n_vocab", "slots", "tail", "two", "served"),
    [
        (torch.bfloat16, 151_936, 16, True, False, True),
        (torch.bfloat16, 151_936, 32, False, False, True),
        (torch.float32, 32_000, 16, True, False, True),
        (torch.bfloat16, 151_936, 32, True, False, False),  # slower than the row kernel
        (torch.bfloat16, 151_936, 64, False, False, False),  # a warp's slots wait for themselves alone
        (torch.bfloat16, 151_936, 16, False, True, False),  # spills
        (torch.float16, 151_936, 16, True, False, False),  # spills
        (torch.float32, 311_296, 16, True, False, True),
        (torch.float32, 311_297, 16, True, False, False),  # more parts than a warp polls for
        (torch.bfloat16, 12_288, 16, True, False, False),  # the row kernel reads it once
    ],
)
def test_what_is_served(
    dtype: torch.dtype, n_vocab: int, slots: int, tail: bool, two: bool, served: bool
) -> None:
    logits_NV = torch.empty(2, n_vocab, dtype=dtype, device="meta")
    assert loss._splits(logits_NV, slots, tail=tail, two=two) == served


@gpu
@needs_cuda
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"N{size[0]}-V{size[1]}")
def test_the_same_bits_beside_other_work(size: tuple[int, int], name: str) -> None:
    """Alone, beside matrix products, beside itself, in a graph's replay: more programs than fit, one, few."""
    logits_NV, tokens = _case(*size)
    settings = SETTINGS[name]

    def run(rows_NV: torch.Tensor) -> TokenTerms:
        return loss.loss_rows(rows_NV, tokens, settings, rows_NV)

    def result(rows_NV: torch.Tensor, terms: TokenTerms) -> tuple:
        torch.cuda.synchronize()
        return rows_NV, terms

    first_NV = logits_NV.clone()
    first = result(first_NV, run(first_NV))
    assert not first[1].logp_N.isnan().any()
    for again in _others(logits_NV, run, result):
        assert backends.same(again, first)


def _others(logits_NV, run, result) -> Iterator[tuple]:
    other = torch.cuda.Stream()
    square = torch.randn(4096, 4096, dtype=torch.bfloat16, device=DEVICE)
    for _ in range(3):
        rows_NV = logits_NV.clone()
        torch.cuda.synchronize()
        with torch.cuda.stream(other):
            for _ in range(20):
                square @ square
        yield result(rows_NV, run(rows_NV))
    rows_NV, beside_NV = logits_NV.clone(), logits_NV.clone()
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        beside = run(beside_NV)
    terms = run(rows_NV)
    yield result(rows_NV, terms)
    yield result(beside_NV, beside)
    graph, rows_NV = torch.cuda.CUDAGraph(), logits_NV.clone()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        terms = run(rows_NV)
    for _ in range(3):
        rows_NV.copy_(logits_NV)
        graph.replay()
        yield result(rows_NV, terms)


def _case(n_rows: int, n_vocab: int) -> tuple[torch.Tensor, LossTokens]:
    """Two teachers of 16, and a token in eleven that counts nowhere."""
    generator = torch.Generator(DEVICE).manual_seed(n_vocab)

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator, device=DEVICE)

    logits_NV = (8 * rand(n_rows, n_vocab)).bfloat16()
    weight_N = torch.where(torch.arange(n_rows, device=DEVICE) % 11 == 10, 0.0, 1 / n_rows)
    ids_NMS = (rand(n_rows, 2, 16) * n_vocab / 16).int()
    ids_NMS += torch.arange(16, device=DEVICE, dtype=torch.int32) * (n_vocab // 16)
    return logits_NV, LossTokens(
        token_ids_N=(rand(n_rows) * n_vocab).long(),
        adv_N=rand(n_rows) - 0.5,
        pg_weight_N=weight_N,
        old_logp_N=-10 - rand(n_rows),
        kl_weight_N=weight_N,
        ent_weight_N=weight_N,
        teacher_ids_NMS=ids_NMS,
        teacher_logps_NMS=rand(n_rows, 2, 16).log_softmax(-1) - 0.1,
        log_alpha=torch.full((2,), 0.5, device=DEVICE).log(),
    )
