"""Attention by pieces equals attention under the mask in outputs and gradients.

test_packing.py compares the mask with single sequences, test_paths.py whole models with transformers.
"""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from torch.nn.attention import varlen
from torch.utils._python_dispatch import TorchDispatchMode

from smopd.engine.models import attention
from smopd.engine.models.head import response_hidden
from smopd.engine.models.packing import pack
from smopd.engine.models.paths import choose
from smopd.engine.settings import Packing
from smopd.engine.types import Layout, Rollout, TokenBatch
from tests.engine.tiny import tiny_model

ONE_ROW = Layout("pieces")
HEADS, KV_HEADS, SIZE = 4, 2, 16
UNITS = st.lists(
    st.tuples(st.integers(1, 70), st.lists(st.integers(1, 40), min_size=1, max_size=5)),
    min_size=1,
    max_size=4,
)
HOSTILE = {
    "one token": [(1, [1])],
    "no read position": [(5, [1, 1, 1])],
    "one-token responses between": [(4, [1, 6, 1, 1, 3])],
    "prompts of very different lengths": [(300, [2, 3]), (1, [40, 1, 40]), (2, [2] * 9)],
}


def rollouts_of(units: list[tuple[int, list[int]]]) -> list[Rollout]:
    return [
        Rollout((2,) * prompt, torch.zeros(length, dtype=torch.int64), torch.zeros(length), group, True)
        for group, (prompt, lengths) in enumerate(units)
        for length in lengths
    ]


def batch_of(units: list[tuple[int, list[int]]], share: bool = True) -> TokenBatch:
    packing = Packing(micro_batch_tokens=10_000, share_prompts=share)
    (batch,) = pack(rollouts_of(units), packing, ONE_ROW)
    return batch


def inputs(n: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(n)
    sizes = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [torch.randn(n, heads, SIZE, generator=generator).to(dtype) for heads in sizes]


def results(attend, query, key, value, grad_out, *rest) -> list[torch.Tensor]:
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    out = attend(*leaves, *rest)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


def by_mask(query_THd, key_TKd, value_TKd, pieces, scale):
    """sdpa under the mask."""
    query, key, value = (x.transpose(0, 1)[None] for x in (query_THd, key_TKd, value_TKd))
    mask = attention.mask_of(pieces, (1, len(query_THd)), query_THd.device)
    out = functional.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def bottom_right_varlen(
    query, key, value, starts, key_starts, longest, longest_k, *, scale, window_size, **_
):
    """Compute on CPU tensors what torch documents for its variable-length kernels."""
    assert window_size == (-1, 0)
    assert starts.dtype == key_starts.dtype == torch.int32
    places, key_places = starts.tolist(), key_starts.tolist()
    assert (longest, longest_k) == tuple(max(b - a for a, b in pairwise(p)) for p in (places, key_places))
    outputs = []
    for (a, b), (c, d) in zip(pairwise(places), pairwise(key_places), strict=True):
        own_key, own_value = (x[c:d].repeat_interleave(HEADS // KV_HEADS, 1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[a:b], own_key) * (scale or SIZE**-0.5)
        seen = torch.arange(d - c)[None] <= torch.arange(b - a)[:, None] + (d - c) - (b - a)
        probabilities = scores.masked_fill(~seen, -math.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", probabilities, own_value))
    return torch.cat(outputs)


def assert_as_under_the_mask(form, batch: TokenBatch, scale: float | None = None) -> None:
    tensors = inputs(batch.input_ids.numel())
    found = results(form, *tensors, batch.pieces, scale)
    for mine, expected in zip(found, results(by_mask, *tensors, batch.pieces, scale), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["by_halves", "by_kernel"])
@pytest.mark.parametrize("share", [True, False], ids=["shared", "separate"])
@pytest.mark.parametrize("units", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_layouts_attend_as_under_the_mask(form, units, share, monkeypatch):
    monkeypatch.setattr(varlen, "varlen_attn", bottom_right_varlen)
    assert_as_under_the_mask(getattr(attention, form), batch_of(units, share), 0.4)


@settings(max_examples=25, deadline=None)
@given(units=UNITS, budget=st.integers(1, 200))
def test_any_layout_attends_as_under_the_mask_and_holds_every_position_once(units, budget):
    assert_as_under_the_mask(attention.by_halves, batch_of(units))
    for batch in pack(rollouts_of(units), Packing(micro_batch_tokens=budget)):
        ends = [0, *(piece.end for piece in batch.pieces)]
        assert [*(piece.begin for piece in batch.pieces), batch.input_ids.numel()] == ends
        assert all(piece.begin < piece.end for piece in batch.pieces)


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor that an operation returns."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, torch.Tensor):
                self.numbers = max(self.numbers, value.untyped_storage().nbytes() // value.element_size())
        return out


def test_nothing_holds_the_square_of_the_row():
    batch, model = batch_of([(200, [150] * 6)]), tiny_model()
    tensors = inputs(batch.input_ids.numel())
    with Largest() as largest:
        results(attention.by_halves, *tensors, batch.pieces, None)
    assert largest.numbers == tensors[0].numel()
    with Largest() as largest:
        results(by_mask, *tensors, batch.pieces, None)
    assert largest.numbers >= len(tensors[0]) ** 2
    choose(model, "auto", torch.float32)
    with Largest() as largest:
        response_hidden(model, batch)
    assert largest.numbers < batch.input_ids.numel() ** 2


@pytest.mark.gpu
def test_the_variable_length_kernels_agree_with_sdpa_on_this_gpu():
    batch = batch_of([(40, [30, 20, 1, 9]), (3, [60, 2])])
    tensors = [x.cuda() for x in inputs(batch.input_ids.numel(), torch.bfloat16)]
    expected = results(by_mask, *tensors, batch.pieces, None)
    for mine, exact in zip(results(attention.by_kernel, *tensors, batch.pieces, None), expected, strict=True):
        assert (mine - exact).abs().max() < 3e-2 * exact.abs().max()  # a few roundings of bfloat16
    assert choose(tiny_model().cuda(), "auto", torch.bfloat16).attends == "pieces"
