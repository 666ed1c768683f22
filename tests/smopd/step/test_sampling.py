"""Sampling: the policy of each batch, one step ahead, and independent random draws."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from smopd.config.settings import Settings, merged
from smopd.engine import distributed
from smopd.engine.types import Rollout
from smopd.step.sampling import Sampler
from smopd.step.stop import StaleRollout
from tests.smopd.run.invariance_worker import SETTINGS, FixedRollouts, prompt_set

STEPS = {"loop": {"steps": 4}}
AHEAD = merged(STEPS, {"loop": {"async_level": 1}, "loss": {"old_logps": "rollout"}})


def settings(changes):
    return Settings.model_validate(merged(SETTINGS, changes))


@contextmanager
def sampler(changes, engine):
    with distributed.thread("sampling", torch.device("cpu")) as thread:
        yield Sampler(settings(changes), prompt_set(), engine, thread)


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
        pairs = zip(
            [prompt.token_ids for batch in taken for prompt in batch.prompts],
            [group for batch in taken for group in batch.group_R.tolist()],
            strict=True,
        )
        return set(pairs)

    n = len(prompt_set())
    first_epoch = {(prompt.token_ids, i) for i, prompt in enumerate(prompt_set())}
    assert groups_of(n, 1) == groups_of(1, n) == first_epoch
    assert groups_of(n, 2) == first_epoch | {(ids, n + i) for ids, i in first_epoch}
