"""Sampling: the policy of each batch, one step ahead, independent draws, and prompts that are replaced."""

import math
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch

from smopd.config.settings import merged
from smopd.engine import distributed
from smopd.engine.types import Rollout
from smopd.rewards.pool import FAILURE_KINDS
from smopd.step.sampling import ATTEMPT_STEPS, Sampler, flat_groups, resample
from smopd.step.stop import StaleRollout
from tests.smopd.run.invariance_worker import (
    GROUP_SIZE,
    PROMPTS,
    FixedRewarder,
    FixedRollouts,
    prompt_set,
    settings_of,
)

NAN = math.nan

STEPS = {"loop": {"steps": 4}}
AHEAD = merged(STEPS, {"loop": {"async_level": 1}, "loss": {"old_logps": "rollout"}})


@contextmanager
def sampler(changes, engine=None, ahead=None, prompts=None):
    with distributed.thread("sampling", torch.device("cpu")) as thread:
        prompts = prompts or prompt_set()
        yield Sampler(settings_of(**changes), prompts, engine or FixedRollouts(), thread, ahead)


def versions(batch):
    return {rollout.policy_version for rollout in batch.rollouts}


def trained(batches, engine, step):
    """Do what the loop does between two batches."""
    ahead = batches.settle()
    engine.load_weights([], step + 1)
    return ahead


@pytest.mark.parametrize(("changes", "seen"), [({}, [{0}, {1}, {2}, {3}]), (AHEAD, [{0}, {0}, {1}, {2}])])
def test_a_batch_comes_from_the_policy_of_its_step_or_with_lag_from_the_one_before(changes, seen):
    engine = FixedRollouts()
    with sampler(merged(STEPS, changes), engine) as batches:
        for step in range(4):
            assert versions(batches.take(step)) == seen[step]
            assert (trained(batches, engine, step) is None) == (changes == {} or step == 3)


def test_the_next_batch_waits_for_teachers_whose_engines_share_its_process():
    turns = {"rollout": {"engine": "vllm"}, "teachers": {"engine": "vllm"}}
    apart = {"rollout": {"engine": "vllm", "vllm": {"placement": "process"}}, "teachers": {"engine": "vllm"}}

    def sampled(changes):
        """Return whether taking a batch starts the next one, and the policy of the next one."""
        engine = FixedRollouts()
        with sampler(merged(AHEAD, changes), engine) as batches:
            batches.take(0)
            begun = batches.settle() is not None
            batches.begin(1)
            assert batches.settle()["step"] == 1
            batches.begin(1)  # has no effect
            return begun, versions(batches.take(1))

    assert sampled(turns) == (False, {0}) and sampled(apart) == (True, {0})


OTHERS = [replace(prompt, token_ids=(2, *prompt.token_ids)) for prompt in prompt_set()]


@pytest.mark.parametrize(
    ("changes", "prompts", "version"),
    [
        ({}, None, 0),
        ({"seed": 1}, None, 1),
        ({"rollout": {"group_size": 2}}, None, 1),
        ({"loop": {"prompts_per_step": 5}}, None, 1),
        ({}, OTHERS, 1),
    ],
    ids=["same", "seed", "group size", "prompts per step", "data"],
)
def test_a_kept_batch_whose_prompts_are_no_longer_the_steps_is_sampled_anew(changes, prompts, version):
    with sampler(AHEAD) as before:
        before.take(0)
        ahead = before.settle()
    engine = FixedRollouts()
    engine.load_weights([], 1)
    with sampler(merged(AHEAD, changes), engine, ahead, prompts) as batches:
        batch = batches.take(1)
    assert versions(batch) == {version}
    assert [rollout.prompt_ids for rollout in batch.rollouts] == [each.token_ids for each in batch.prompts]
    assert [rollout.group for rollout in batch.rollouts] == batch.group_R.tolist()


class Stale(FixedRollouts):
    def generate(self, prompts, groups, sampling):
        first, *others = super().generate(prompts, groups, sampling)
        return [Rollout(**{**vars(first), "policy_version": self.policy_version - 1}), *others]


def test_an_older_response_is_refused():
    engine = Stale()
    engine.load_weights([], 5)
    stale = pytest.raises(StaleRollout, match=r"policy 4, expected 5 or later \(loop.async_level\)")
    with sampler({}, engine) as batches, stale:
        batches.take(5)


def test_a_prompts_draws_are_its_own_wherever_it_stands():
    def groups_of(prompts_per_step, steps):
        changes = {"loop": {"prompts_per_step": prompts_per_step, "steps": steps, "updates_per_step": 1}}
        engine, taken = FixedRollouts(), []
        with sampler(changes, engine) as batches:
            for step in range(steps):
                taken.append(batches.take(step))
                trained(batches, engine, step)
        ids = [prompt.token_ids for batch in taken for prompt in batch.prompts]
        groups = [group for batch in taken for group in batch.group_R.tolist()]
        return set(zip(ids, groups, strict=True))

    n = len(prompt_set())
    first_epoch = {(prompt.token_ids, i) for i, prompt in enumerate(prompt_set())}
    assert groups_of(n, 1) == groups_of(1, n) == first_epoch
    assert groups_of(n, 2) == first_epoch | {(ids, n + i) for ids, i in first_epoch}


def test_a_group_is_flat_if_no_reward_differs_though_their_sum_may_not() -> None:
    groups = [
        [[1, 0], [0, 1]],  # flat for DAPO, which looks at the sum
        [[1, 1], [1, 1]],
        [[1, NAN], [1, 0]],
        [[NAN, NAN], [NAN, NAN]],
        [[NAN, 1], [0, 0]],
    ]
    rewards_RK = torch.tensor(groups, dtype=torch.float64).flatten(0, 1)
    assert flat_groups(rewards_RK, 2) == [1, 2, 3]
    assert flat_groups(rewards_RK[:, :1], 2) == [1, 2, 3, 4], "one score is no difference"
    assert flat_groups(rewards_RK[:0], 2) == []


def attempts(batch) -> list[int]:
    """The attempt that each place's prompt comes from."""
    return (batch.group_R[::GROUP_SIZE] // (ATTEMPT_STEPS * PROMPTS)).tolist()


@pytest.mark.parametrize("most", [1, 4])
def test_flat_groups_are_replaced_until_they_are_not(most: int) -> None:
    with sampler({"rollout": {"resample": most}}) as own:
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
    with sampler({"rollout": {"resample": 1}}) as own:
        batch = own.take(0)
        _, _, both = resample(own, FixedRewarder(), 0, batch, [0.5, 0.5], nullcontext)
        _, _, sparse = resample(own, FixedRewarder(), 0, batch, [0.0, 1.0], nullcontext)
    assert both == 0 < sparse
