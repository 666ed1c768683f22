"""Packing changes no hidden state and no order, and keeps to its budget."""

import pytest
import torch

from smopd.engine.models.attention import choose, takes_pieces
from smopd.engine.models.loading import response_hidden
from smopd.engine.models.packing import empty_batch, flat_offsets, pack
from smopd.engine.settings import Packing
from tests.engine.tiny import ragged_rollouts, tiny_model

PACKINGS = {
    "one-batch-shared": Packing(micro_batch_tokens=10_000),
    "one-batch-separate": Packing(micro_batch_tokens=10_000, share_prompts=False),
    "small-batches-shared": Packing(micro_batch_tokens=40),
    "small-batches-separate": Packing(micro_batch_tokens=40, share_prompts=False),
    "one-sequence-a-batch": Packing(micro_batch_tokens=1, share_prompts=False),
}


@pytest.mark.parametrize("family", ["qwen2", "llama"])
@pytest.mark.parametrize(
    ("wanted", "one_row_from"), [("sdpa", None), ("sdpa", 0), ("auto", None), ("auto", 0), ("auto", 20)]
)
@pytest.mark.parametrize("packing", PACKINGS.values(), ids=PACKINGS.keys())
def test_hidden_states_equal_those_of_single_sequences(packing, wanted, one_row_from, family):
    model, rollouts = tiny_model(family=family).eval(), ragged_rollouts(0)
    plain = tiny_model(family=family).eval()
    choose(model, wanted, torch.device("cpu"), torch.float32)
    assert takes_pieces(model) == (wanted == "auto")
    offsets = flat_offsets(rollouts)
    hidden_ND = torch.full((offsets[-1], 64), torch.nan)
    token_ids_N = torch.full((offsets[-1],), -1)
    with torch.no_grad():
        for batch in pack(rollouts, packing, one_row_from=one_row_from):
            assert hidden_ND[batch.flat_N].isnan().all(), "a token stands in two micro-batches"
            hidden_ND[batch.flat_N] = response_hidden(model, batch)
            token_ids_N[batch.flat_N] = batch.token_ids_N
        for i, rollout in enumerate(rollouts):
            ids = torch.cat([torch.tensor(rollout.prompt_ids), rollout.response_ids])[None]
            alone = plain.get_decoder()(input_ids=ids).last_hidden_state[0, len(rollout.prompt_ids) - 1 : -1]
            torch.testing.assert_close(hidden_ND[offsets[i] : offsets[i + 1]], alone, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(token_ids_N, torch.cat([rollout.response_ids for rollout in rollouts]))


@pytest.mark.parametrize("one_row_from", [None, 0])
@pytest.mark.parametrize("share", [True, False])
def test_micro_batches_keep_to_the_token_budget(share, one_row_from):
    rollouts = ragged_rollouts(1, groups=9)
    for batch in pack(
        rollouts, Packing(micro_batch_tokens=48, share_prompts=share), one_row_from=one_row_from
    ):
        assert batch.input_ids.numel() <= 48


@pytest.mark.parametrize("packing", PACKINGS.values(), ids=PACKINGS.keys())
def test_one_row_has_no_padding(packing):
    batches = pack(ragged_rollouts(5), packing, one_row_from=0)
    assert all(len(batch.input_ids) == 1 and (batch.unit_ids >= 0).all() for batch in batches)
    if packing.micro_batch_tokens == 10_000:
        assert len(batches) == 1


def test_pieces_are_told_of_long_units_alone():
    batches = pack(ragged_rollouts(5), Packing(micro_batch_tokens=48), one_row_from=20)
    longest = [
        int(batch.unit_ids.flatten()[batch.unit_ids.flatten() >= 0].bincount().max()) for batch in batches
    ]
    assert {length >= 20 for length in longest} == {False, True}
    for batch, length in zip(batches, longest, strict=True):
        assert bool(batch.pieces) == (length >= 20)
        assert not batch.pieces or len(batch.input_ids) == 1


def test_a_sequence_over_the_budget_goes_alone():
    rollouts = ragged_rollouts(2)
    batches = pack(rollouts, Packing(micro_batch_tokens=1))
    assert len(batches) == len(rollouts)
    assert all(batch.input_ids.shape[0] == 1 for batch in batches)


def test_sharing_prompts_reads_each_once():
    rollouts = ragged_rollouts(3)
    (batch,) = pack(rollouts, Packing(micro_batch_tokens=100_000))
    read = int((batch.unit_ids >= 0).sum())
    prompts = {rollout.group: len(rollout.prompt_ids) for rollout in rollouts}
    assert read == sum(prompts.values()) + sum(len(rollout.response_ids) - 1 for rollout in rollouts)


def test_nothing_to_pack_and_the_empty_batch():
    assert pack([], Packing()) == []
    hidden = response_hidden(tiny_model(), empty_batch())
    assert hidden.shape == (0, 64)
    assert hidden.requires_grad
