"""The batches of a run by step: sampled when wanted, or one step ahead while the last one trains."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, Future
from typing import Any

from smopd.config.settings import Settings
from smopd.data.prompts import Prompt, batch_indices
from smopd.engine import distributed
from smopd.engine.protocols import RolloutEngine
from smopd.engine.types import Rollout, Sampling
from smopd.step.batch import Batch, positions
from smopd.step.ends import StaleRollout, all_or_raise


class Sampler:
    """This rank's rollouts of each step.

    Args:
        prompts: the training set.
        thread: samples ahead.
        ahead: what `settle` gave for the checkpoint that the run resumes from.
    """

    def __init__(
        self,
        settings: Settings,
        prompts: Sequence[Prompt],
        engine: RolloutEngine,
        thread: Executor,
        ahead: dict[str, Any] | None = None,
    ):
        self.settings, self.prompts, self.engine, self._thread = settings, prompts, engine, thread
        # vLLM engines of this process work in turns: the next batch waits for the teachers
        self._in_turns = settings.rollout.colocated and settings.teachers.colocated
        self._begun: dict[int, Future[Batch]] = {}
        if ahead is not None and settings.loop.async_level:
            rollouts = [Rollout(**values) for values in ahead["rollouts"]]
            self._begun[ahead["step"]] = self._thread.submit(self._batch, ahead["step"], rollouts)

    def take(self, step: int) -> Batch:
        """The batch of `step`; with a lag, begins the next one where engines do not work in turns.

        A collective call.

        Raises:
            StaleRollout, NoServer: on one rank or several, and so on every one.
        """
        return all_or_raise(lambda: self._take(step))

    def _take(self, step: int) -> Batch:
        begun = self._begun.pop(step, None)
        batch = self._batch(step) if begun is None else begun.result()
        oldest = step - self.settings.loop.async_level
        for rollout in batch.rollouts:
            if rollout.policy_version < oldest:
                raise StaleRollout(
                    f"step {step}: a response comes from policy {rollout.policy_version}, "
                    f"expected {oldest} or later (loop.async_level)"
                )
        if not self._in_turns:
            self.begin(step + 1)
        return batch

    def begin(self, step: int) -> None:
        """With a lag, has the batch of `step` sampled with the policy of now, if that is not begun."""
        loop = self.settings.loop
        if loop.async_level and step < loop.steps and step not in self._begun:
            self._begun[step] = self._thread.submit(self._batch, step)

    def settle(self) -> dict[str, Any] | None:
        """Waits until the engine is idle; what was begun ahead, for a checkpoint. A collective call."""
        for step, begun in self._begun.items():
            return {"step": step, "rollouts": [vars(each) for each in all_or_raise(begun.result).rollouts]}
        return None

    def _batch(self, step: int, rollouts: list[Rollout] | None = None) -> Batch:
        """The batch of `step`, of `rollouts` where they are there already."""
        loop, options, n = self.settings.loop, self.settings.rollout, len(self.prompts)
        chosen = batch_indices(n, loop.prompts_per_step, step, self.settings.seed)
        prompts = [self.prompts[i] for i in chosen]
        ranks = distributed.world_size()
        shares = positions(len(prompts), loop.updates_per_step, distributed.rank(), ranks)
        if rollouts is None:
            first = step * loop.prompts_per_step
            groups = [(first + place) // n * n + i for place, i in enumerate(chosen)]  # epoch and prompt
            mine = [place for share in shares for place in share]
            sampling = Sampling(
                n=options.group_size,
                temperature=options.temperature,
                max_new_tokens=options.max_new_tokens,
                seed=self.settings.seed,
            )
            token_ids = [prompts[place].token_ids for place in mine]
            rollouts = self.engine.generate(token_ids, [groups[place] for place in mine], sampling)
        return Batch.of(prompts, shares, rollouts, options.group_size)
