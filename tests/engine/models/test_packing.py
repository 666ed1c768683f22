"""Packing changes neither hidden states nor order, and keeps to its token budget."""

import pytest
import torch

from smopd.engine.models.head import response_hidden
from smopd.engine.models.packing import empty_batch, flat_offsets, pack
from smopd.engine.models.paths import layout_of
from smopd.engine.settings import Packing
from smopd.engine.types import Layout
from tests.engine.tiny import ragged_rollouts, tiny_model, with_turns

PACKINGS = {
    "one-batch-shared": Packing(micro_batch_tokens=10_000),
    "small-batches-shared": Packing(micro_batch_tokens=40),
    "small-batches-separate": Packing(micro_batch_tokens=40, share_prompts=False),
    "one-sequence-a-batch": Packing(micro_batch_tokens=1, share_prompts=False),
}


LAYOUTS = [
    Layout("mask"),
    Layout("plain"),
    Layout("pieces"),
    Layout("pieces", one_row_from=20),
    Layout("mask", alone_above=18),
    Layout("pieces", alone_above=18),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("packing", PACKINGS.values(), ids=PACKINGS.keys())
def test_hidden_states_equal_those_of_single_sequences(packing, layout):
    model, rollouts = tiny_model().eval(), with_turns(ragged_rollouts(0))
    plain = tiny_model().eval()
    layout_of(model, layout.attends)
    offsets = flat_offsets(rollouts)
    hidden_ND = torch.full((offsets[-1], 64), torch.nan)
    token_ids_N = torch.full((offsets[-1],), -1)
    with torch.no_grad():
        for batch in pack(rollouts, packing, layout):
            one = (batch.position_ids == 0).sum() == 1  # and no padding
            assert one or batch.position_ids.max() < (layout.alone_above or 1000)
            assert hidden_ND[batch.flat_N].isnan().all(), "a token stands in two micro-batches"
            hidden_ND[batch.flat_N] = response_hidden(model, batch)
            token_ids_N[batch.flat_N] = batch.token_ids_N
        for i, rollout in enumerate(rollouts):
            ids = torch.cat([torch.tensor(rollout.prompt_ids), rollout.response_ids])[None]
            alone = plain.get_decoder()(input_ids=ids).last_hidden_state[0, len(rollout.prompt_ids) - 1 : -1]
            expected_ND = rollout.of_policy(alone)
            torch.testing.assert_close(
                hidden_ND[offsets[i] : offsets[i + 1]], expected_ND, rtol=1e-4, atol=1e-5
            )
    assert token_ids_N.equal(torch.cat([rollout.of_policy(rollout.response_ids) for rollout in rollouts]))


@pytest.mark.parametrize("layout", LAYOUTS[:4])
@pytest.mark.parametrize("share", [True, False])
def test_micro_batches_keep_to_the_token_budget(share, layout):
    packing = Packing(micro_batch_tokens=48, share_prompts=share)
    for batch in pack(ragged_rollouts(1, groups=9), packing, layout):
        assert batch.input_ids.numel() <= 48
        longest = max(piece.end - piece.begin for piece in batch.pieces)
        assert batch.attends == layout.attends or longest < layout.one_row_from
        if batch.attends == "pieces":
            assert len(batch.input_ids) == 1 and batch.input_ids.all(), "0 is padding"


def test_sharing_prompts_reads_each_once():
    rollouts = ragged_rollouts(3)
    (batch,) = pack(rollouts, Packing(micro_batch_tokens=100_000), Layout("pieces"))
    prompts = {rollout.group: len(rollout.prompt_ids) for rollout in rollouts}
    read = sum(prompts.values()) + sum(len(rollout.response_ids) - 1 for rollout in rollouts)
    assert batch.input_ids.numel() == read


def test_nothing_to_pack_and_the_empty_batch():
    assert pack([], Packing()) == ()
    hidden = response_hidden(tiny_model(), empty_batch())
    assert hidden.shape == (0, 64)
    assert hidden.requires_grad
