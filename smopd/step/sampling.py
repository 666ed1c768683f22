"""Sampling of each step's batch, on demand or one step ahead during the current update."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, Future
from typing import Any

from smopd.config.settings import Settings
from smopd.data.prompts import Prompt, batch_indices
from smopd.engine import distributed
from smopd.engine.errors import NonFinite
from smopd.engine.protocols import RolloutEngine
from smopd.engine.types import Rollout, Sampling
from smopd.step.batch import Batch, positions
from smopd.step.conversation import Conversations, sample
from smopd.step.stop import StaleRollout, all_or_raise

ATTEMPT_STEPS = 1 << 20
"""Ours: a prompt that replaces another one is that of so many steps later, which no run reaches."""


class Sampler:
    """This rank's rollouts of each step. `ahead` is the result of `settle` before a resume."""

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
        # two vLLM engines in this process cannot run at once: sampling ahead waits for the teachers
        self._in_turns = settings.rollout.colocated and settings.teachers.colocated
        self._begun: dict[int, Future[Batch]] = {}
        if ahead is not None and settings.loop.async_level:
            rollouts = [Rollout(**values) for values in ahead["rollouts"]]
            self._begun[ahead["step"]] = self._thread.submit(self._batch, ahead["step"], rollouts)

    def take(self, step: int) -> Batch:
        """Return the batch of `step`, and begin the next one if sampling is ahead; a collective call.

        Raises:
            StaleRollout, NoServer, NonFinite: on every rank, if it happened on one.
        """
        return all_or_raise(lambda: self._take(step))

    def again(self, step: int, attempt: int, batch: Batch, flat: Sequence[int]) -> Batch:
        """Return the batch with prompts of a later epoch in place of this rank's groups `flat`.

        A collective call; see `take`. `attempt` counts from 1. The prompts depend on it, on the step and on
        the places of the groups in the step alone.
        """

        def replace() -> Batch:
            places, asked = self._asked(step + attempt * ATTEMPT_STEPS)
            n, chosen = self.settings.rollout.group_size, [asked[i] for i in flat]
            prompts, rollouts, fresh = batch.prompts[::n], list(batch.rollouts), self._sampled(chosen)
            for k, i in enumerate(flat):
                prompts[i], rollouts[i * n : (i + 1) * n] = chosen[k][0], fresh[k * n : (k + 1) * n]
            return self._checked(step, self._of(places, prompts, rollouts))

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
        """Start sampling `step` with the current policy, if sampling is ahead and has not started."""
        loop = self.settings.loop
        if loop.async_level and step < loop.steps and step not in self._begun:
            self._begun[step] = self._thread.submit(self._batch, step)

    def settle(self) -> dict[str, Any] | None:
        """Wait for the engine, and return the batch sampled ahead for a checkpoint; a collective call."""
        for step, begun in self._begun.items():
            return {"step": step, "rollouts": [vars(each) for each in all_or_raise(begun.result).rollouts]}
        return None

    def _batch(self, step: int, rollouts: list[Rollout] | None = None) -> Batch:
        """Build the batch of `step`, from `rollouts` if given."""
        places, asked = self._asked(step)
        rollouts = self._sampled(asked) if rollouts is None else rollouts
        return self._of(places, [prompt for prompt, _ in asked], rollouts)

    def _asked(self, step: int) -> tuple[list[list[int]], list[tuple[Prompt, int]]]:
        """Return the positions of each update on this rank, and the prompt and group of each position."""
        loop, n = self.settings.loop, len(self.prompts)
        chosen = batch_indices(n, loop.prompts_per_step, step, self.settings.seed)
        places = positions(len(chosen), loop.updates_per_step, distributed.rank(), distributed.world_size())
        first = step * loop.prompts_per_step
        groups = [(first + place) // n * n + i for place, i in enumerate(chosen)]  # epoch and prompt
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

    def _of(self, places: list[list[int]], prompts: list[Prompt], rollouts: list[Rollout]) -> Batch:
        mine = [place for share in places for place in share]
        by_place = dict(zip(mine, prompts, strict=True))
        return Batch.of(by_place, places, rollouts, self.settings.rollout.group_size)
