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

    def _take(self, step: int) -> Batch:
        begun = self._begun.pop(step, None)
        batch = self._batch(step) if begun is None else begun.result()
        if not batch.rollout_logp_N.isfinite().all():
            raise NonFinite("the log-probability of a sampled token is not finite")
        oldest = step - self.settings.loop.async_level
        for rollout in batch.rollouts:
            if rollout.policy_version < oldest:
                raise StaleRollout(
                    f"step {step}: got a response of policy {rollout.policy_version}, "
                    f"expected {oldest} or later (loop.async_level)"
                )
        if not self._in_turns:
            self.begin(step + 1)
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
        loop, options, n = self.settings.loop, self.settings.rollout, len(self.prompts)
        chosen = batch_indices(n, loop.prompts_per_step, step, self.settings.seed)
        ranks = distributed.world_size()
        shares = positions(len(chosen), loop.updates_per_step, distributed.rank(), ranks)
        mine = [place for share in shares for place in share]
        prompts = {place: self.prompts[chosen[place]] for place in mine}
        if rollouts is None:
            first = step * loop.prompts_per_step
            groups = [(first + place) // n * n + i for place, i in enumerate(chosen)]  # epoch and prompt
            sampling = Sampling(
                n=options.group_size,
                temperature=options.temperature,
                max_new_tokens=options.max_new_tokens,
                seed=self.settings.seed,
            )
            asked, own = [prompts[place] for place in mine], [groups[place] for place in mine]
            rollouts = sample(self.engine, self.conversations, asked, own, sampling)
        return Batch.of(prompts, shares, rollouts, options.group_size)
