"""Dynamic sampling: prompts of which no reward can be learned make room for others."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch

from smopd.config.settings import Settings, merged
from smopd.engine import distributed
from smopd.rewards.pool import FAILURE_KINDS
from smopd.step.sampling import ATTEMPT_STEPS, Sampler, flat_groups, resample
from tests.smopd.run.invariance_worker import PROMPTS, SETTINGS, FixedRewarder, FixedRollouts, prompt_set

nan = torch.nan
GROUP_SIZE = SETTINGS["rollout"]["group_size"]


def test_a_group_is_flat_if_no_reward_differs_though_their_sum_may_not() -> None:
    groups = [
        [[1, 0], [0, 1]],  # flat for DAPO, which looks at the sum
        [[1, 1], [1, 1]],
        [[1, nan], [1, 0]],
        [[nan, nan], [nan, nan]],
        [[nan, 1], [0, 0]],
    ]
    rewards_RK = torch.tensor(groups, dtype=torch.float64).flatten(0, 1)
    assert flat_groups(rewards_RK, 2) == [1, 2, 3]
    assert flat_groups(rewards_RK[:, :1], 2) == [1, 2, 3, 4], "one score is no difference"
    assert flat_groups(rewards_RK[:0], 2) == []


@contextmanager
def sampler(most: int):
    settings = Settings.model_validate(merged(SETTINGS, {"rollout": {"resample": most}}))
    with distributed.thread("sampling", torch.device("cpu")) as thread:
        yield Sampler(settings, prompt_set(), FixedRollouts(), thread)


def attempts(batch) -> list[int]:
    """The attempt that each place's prompt comes from."""
    return (batch.group_R[::GROUP_SIZE] // (ATTEMPT_STEPS * PROMPTS)).tolist()


@pytest.mark.parametrize("most", [1, 4])
def test_flat_groups_are_replaced_until_they_are_not(most: int) -> None:
    with sampler(most) as own:
        first = own.take(0)
        again = partial(resample, own, FixedRewarder(flat=True), 0, first, [0.5, 0.5], nullcontext)
        batch, rewards, replaced = again()
        assert again()[0].token_ids_N.equal(batch.token_ids_N), "nothing but the step decides"
    flat = flat_groups(rewards.rewards_RK, GROUP_SIZE)
    was = [i for i, group in enumerate(first.group_R[::GROUP_SIZE].tolist()) if group % 3 == 0]
    tried = attempts(batch)
    assert was and [i for i, attempt in enumerate(tried) if attempt] == was and replaced == sum(tried)
    assert flat == [i for i in was if int(batch.group_R[i * GROUP_SIZE]) % 3 == 0]
    assert (flat == []) == (most == 4), "the last attempt stays"
    scored = FixedRewarder(flat=True).score(batch.prompts, batch.rollouts, 0).rewards_RK
    torch.testing.assert_close(rewards.rewards_RK, scored, equal_nan=True)
    assert set(rewards.failures["dense"]) == set(FAILURE_KINDS), "ranks have the same metrics"
    for i, prompt in enumerate(batch.prompts):
        assert batch.rollouts[i].prompt_ids == prompt.token_ids
    kept = [i for i in range(PROMPTS * GROUP_SIZE) if i // GROUP_SIZE not in was]
    assert [batch.rollouts[i] for i in kept] == [first.rollouts[i] for i in kept]


def test_a_reward_of_weight_0_is_no_reason_to_keep_a_group() -> None:
    with sampler(1) as own:
        batch = own.take(0)
        _, _, both = resample(own, FixedRewarder(), 0, batch, [0.5, 0.5], nullcontext)
        _, _, sparse = resample(own, FixedRewarder(), 0, batch, [0.0, 1.0], nullcontext)
    assert both == 0 < sparse
