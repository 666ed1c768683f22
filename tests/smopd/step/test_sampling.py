"""Batches by step: from which policy they come, one step ahead, and over a checkpoint."""

from __future__ import annotations

import pytest
import torch

from smopd.config.settings import Settings, merged
from smopd.engine.types import Rollout
from smopd.step.ends import StaleRollout
from smopd.step.sampling import Sampler
from tests.smopd.run.invariance_worker import SETTINGS, FixedRollouts, prompt_set

CPU = torch.device("cpu")
AHEAD = {"loop": {"async_level": 1, "steps": 4}, "loss": {"old_logps": "rollout"}}


def settings(changes):
    return Settings.model_validate(merged(SETTINGS, changes))


def versions(batch):
    return {rollout.policy_version for rollout in batch.rollouts}


def trained(batches, engine, step):
    """What the loop does between two batches."""
    ahead = batches.settle()
    engine.load_weights([], step + 1)
    return ahead


def test_without_lag_each_batch_comes_from_the_policy_of_its_step():
    engine = FixedRollouts()
    with Sampler(settings({}), prompt_set(), engine, CPU) as batches:
        for step in range(3):
            assert versions(batches.take(step)) == {step}
            assert trained(batches, engine, step) is None


def test_with_lag_each_batch_but_the_first_comes_from_the_policy_before():
    engine = FixedRollouts()
    with Sampler(settings(AHEAD), prompt_set(), engine, CPU) as batches:
        seen = []
        for step in range(4):
            seen.append(versions(batches.take(step)))
            trained(batches, engine, step)
    assert seen == [{0}, {0}, {1}, {2}]


def test_the_next_batch_waits_for_teachers_whose_engines_share_its_process():
    turns = {"rollout": {"engine": "vllm"}, "teachers": {"engine": "vllm"}}
    apart = {"rollout": {"engine": "vllm", "vllm": {"placement": "process"}}, "teachers": {"engine": "vllm"}}

    def sampled(changes):
        """Whether taking the first batch begins the next, and from which policy that comes."""
        engine = FixedRollouts()
        with Sampler(settings(merged(AHEAD, changes)), prompt_set(), engine, CPU) as batches:
            batches.take(0)
            begun = batches.settle() is not None
            batches.begin(1)
            assert batches.settle()["step"] == 1
            batches.begin(1)  # again changes nothing
            return begun, versions(batches.take(1))

    assert sampled(turns) == (False, {0}) and sampled(apart) == (True, {0})


def test_a_batch_begun_ahead_is_the_same_after_a_checkpoint(tmp_path):
    straight, engine = [], FixedRollouts()
    with Sampler(settings(AHEAD), prompt_set(), engine, CPU) as batches:
        for step in range(4):
            straight.append(batches.take(step))
            ahead = trained(batches, engine, step)
            if step == 1:
                torch.save({"extra": ahead}, tmp_path / "process.pt")
    kept = torch.load(tmp_path / "process.pt", weights_only=True)["extra"]
    again = FixedRollouts()
    again.load_weights([], 2)
    with Sampler(settings(AHEAD), prompt_set(), again, CPU, kept) as batches:
        for step in (2, 3):
            batch = batches.take(step)
            assert versions(batch) == versions(straight[step])
            assert batch.token_ids_N.equal(straight[step].token_ids_N)
            assert batch.rollout_logp_N.equal(straight[step].rollout_logp_N)
            assert batch.group_R.equal(straight[step].group_R)
            trained(batches, again, step)


class Stale(FixedRollouts):
    def generate(self, prompts, groups, sampling):
        first, *others = super().generate(prompts, groups, sampling)
        return [Rollout(**{**vars(first), "policy_version": self.policy_version - 1}), *others]


def test_an_older_response_is_refused():
    engine = Stale()
    engine.load_weights([], 5)
    stale = pytest.raises(StaleRollout, match=r"policy 4, expected 5 or later \(loop.async_level\)")
    with Sampler(settings({}), prompt_set(), engine, CPU) as batches, stale:
        batches.take(5)


def test_what_fails_ahead_is_raised_where_it_is_taken():
    class Broken(FixedRollouts):
        asked = False

        def generate(self, prompts, groups, sampling):
            if self.asked:
                raise RuntimeError("the engine died")
            self.asked = True
            return super().generate(prompts, groups, sampling)

    with Sampler(settings(AHEAD), prompt_set(), Broken(), CPU) as batches:
        batches.take(0)
        with pytest.raises(RuntimeError, match="the engine died"):
            batches.settle()


def test_a_prompts_draws_are_its_own_wherever_it_stands():
    def groups_of(prompts_per_step, steps):
        changes = {"loop": {"prompts_per_step": prompts_per_step, "steps": steps, "updates_per_step": 1}}
        engine, taken = FixedRollouts(), []
        with Sampler(settings(changes), prompt_set(), engine, CPU) as batches:
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
