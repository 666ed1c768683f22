"""Sampling of each step's batch, on demand or one step ahead, and replacement of prompts in a batch."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from smopd.config.settings import Settings
from smopd.data.prompts import Prompt, batch_indices
from smopd.engine import distributed
from smopd.engine.errors import NonFinite
from smopd.engine.protocols import RolloutEngine
from smopd.engine.types import Rollout, Sampling
from smopd.rewards.pool import RewardBatch
from smopd.step.batch import Batch, positions
from smopd.step.conversation import Conversations, sample
from smopd.step.rewards import Rewarder, replaced
from smopd.step.stop import StaleRollout, all_or_raise

ATTEMPT_STEPS = 1 << 20
"""Ours: replacement prompts are those of a step that is this many steps later, beyond the end of a run."""


class Sampler:
    """Sampler of this rank's rollouts of each step. `ahead` is what `settle` returned before a resume."""

    def __init__(
        self,
        settings: Settings,
        prompts: Sequence[Prompt],
        engine: RolloutEngine,
        thread: Executor,
        ahead: dict[str, Any] | None = None,
        conversations: Conversations | None = None,
    ):
        self.settings, self.prompts, self.engine, self._thread = settings, prompts, engine, thread
        self.conversations = conversations
        # two vLLM engines in this process cannot run at once, so sampling ahead waits for the teachers
        self._in_turns = settings.rollout.colocated and settings.teachers.colocated
        self._begun: dict[int, Future[Batch]] = {}
        if ahead is not None and settings.loop.async_level:
            rollouts = [Rollout(**values) for values in ahead["rollouts"]]
            asked = [(p.token_ids, g) for p, g in self._asked(ahead["step"])[1]]
            expected = [each for each in asked for _ in range(settings.rollout.group_size)]
            same = torch.tensor([(each.prompt_ids, each.group) for each in rollouts] == expected)
            if distributed.all_reduce(same.int(), "min"):  # if seed, data and group size are unchanged
                self._begun[ahead["step"]] = self._thread.submit(self._batch, ahead["step"], rollouts)

    def take(self, step: int) -> Batch:
        """Return a step's batch. If `loop.async_level` is 1, begin the next batch. This is a collective call.

        Raises:
            StaleRollout, NoServer, NonFinite: raised on every rank if one rank fails.
        """
        return all_or_raise(lambda: self._take(step))

    def again(self, step: int, attempt: int, batch: Batch, flat: Sequence[int]) -> Batch:
        """Return the batch with other prompts in place of this rank's groups `flat` (see ATTEMPT_STEPS).

        This is a collective call with the errors of `take`. `attempt` counts from 1. The new prompts depend
        only on `step`, `attempt` and the places of the groups in the step.
        """

        def replace() -> Batch:
            places, asked = self._asked(step + attempt * ATTEMPT_STEPS)
            n, chosen = self.settings.rollout.group_size, [asked[i] for i in flat]
            prompts, rollouts, fresh = batch.prompts[::n], list(batch.rollouts), self._sampled(chosen)
            for k, i in enumerate(flat):
                prompts[i], rollouts[i * n : (i + 1) * n] = chosen[k][0], fresh[k * n : (k + 1) * n]
            return self._checked(step, Batch.of(prompts, places, rollouts, n))

        return all_or_raise(replace)

    def _take(self, step: int) -> Batch:
        begun = self._begun.pop(step, None)
        batch = self._checked(step, self._batch(step) if begun is None else begun.result())
        if not self._in_turns:
            self.begin(step + 1)
        return batch

    def _checked(self, step: int, batch: Batch) -> Batch:
        if not batch.rollout_logp_N.isfinite().all():
            raise NonFinite("the log-probability of a sampled token is not finite")
        oldest = step - self.settings.loop.async_level
        for rollout in batch.rollouts:
            if rollout.policy_version < oldest:
                raise StaleRollout(
                    f"step {step}: got a response of policy {rollout.policy_version}, "
                    f"expected {oldest} or later (loop.async_level)"
                )
        return batch

    def begin(self, step: int) -> None:
        """Start to sample `step` with the current policy if `loop.async_level` is 1, unless it has begun."""
        loop = self.settings.loop
        if loop.async_level and step < loop.steps and step not in self._begun:
            self._begun[step] = self._thread.submit(self._batch, step)

    def settle(self) -> dict[str, Any] | None:
        """Wait for the batch sampled ahead, and return it or None. This is a collective call."""
        for step, begun in self._begun.items():
            return {"step": step, "rollouts": [vars(each) for each in all_or_raise(begun.result).rollouts]}
        return None

    def _batch(self, step: int, rollouts: list[Rollout] | None = None) -> Batch:
        places, asked = self._asked(step)
        rollouts = self._sampled(asked) if rollouts is None else rollouts
        return Batch.of([prompt for prompt, _ in asked], places, rollouts, self.settings.rollout.group_size)

    def _asked(self, step: int) -> tuple[list[list[int]], list[tuple[Prompt, int]]]:
        """Return this rank's positions in each update, and the prompt and group of each position."""
        loop, n = self.settings.loop, len(self.prompts)
        chosen = batch_indices(n, loop.prompts_per_step, step, self.settings.seed)
        places = positions(len(chosen), loop.updates_per_step, distributed.rank(), distributed.world_size())
        first = step * loop.prompts_per_step
        groups = [(first + place) // n * n + i for place, i in enumerate(chosen)]  # from epoch and prompt
        return places, [(self.prompts[chosen[place]], groups[place]) for share in places for place in share]

    def _sampled(self, asked: Sequence[tuple[Prompt, int]]) -> list[Rollout]:
        options = self.settings.rollout
        sampling = Sampling(
            n=options.group_size,
            temperature=options.temperature,
            max_new_tokens=options.max_new_tokens,
            seed=self.settings.seed,
        )
        prompts, groups = [prompt for prompt, _ in asked], [group for _, group in asked]
        return sample(self.engine, self.conversations, prompts, groups, sampling)


def resample(
    sampler: Sampler,
    rewarder: Rewarder,
    step: int,
    batch: Batch,
    weights: Sequence[float],
    phase: Callable[[str], AbstractContextManager[None]],
) -> tuple[Batch, RewardBatch, int]:
    """Score the batch and replace groups without variance, up to rollout.resample times.

    This is a collective call. If a group's responses have equal scores in every reward, their A_k (Eq. 1)
    are 0. DAPO's dynamic sampling compares sums of rewards, which may be equal although the rewards differ.

    Args:
        weights: one per reward. A reward of weight 0 is ignored.
        phase: Metrics.phase, which times parts of the step.
    Returns:
        The batch, its rewards, and how many prompts of this rank were replaced. Responses of the last attempt
        are kept, whatever their scores.
    """
    options, n_replaced = sampler.settings.rollout, 0
    with phase("rewards"):
        rewards = rewarder.score(batch.prompts, batch.rollouts, step)
    weighted_K = torch.tensor(weights) != 0
    for attempt in range(1, options.resample + 1):
        flat = flat_groups(rewards.rewards_RK[:, weighted_K], options.group_size)
        if not int(distributed.all_reduce(torch.tensor(len(flat)))):
            break
        with phase("rollout"):
            batch = sampler.again(step, attempt, batch, flat)
        n_replaced += len(flat)
        with phase("rewards"):
            rows = [i * options.group_size + k for i in flat for k in range(options.group_size)]
            if rows:
                chosen = [batch.prompts[row] for row in rows], [batch.rollouts[row] for row in rows]
                rewards = replaced(rewards, rows, rewarder.score(*chosen, step, check=False))
    return batch, rewards, n_replaced


def flat_groups(rewards_RK: Tensor, group_size: int) -> list[int]:
    """Return the groups in which no reward differs between two scored responses."""
    rewards_GnK = rewards_RK.unflatten(0, (-1, group_size)) if len(rewards_RK) else rewards_RK[:, None]
    low_GK = rewards_GnK.nan_to_num(torch.inf).amin(1)
    high_GK = rewards_GnK.nan_to_num(-torch.inf).amax(1)
    return (low_GK >= high_GK).all(1).nonzero()[:, 0].tolist()
