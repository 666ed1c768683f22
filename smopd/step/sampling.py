"""The batches of a run by step: sampled when wanted, or one step ahead while the last one trains."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch

from smopd.config.settings import Settings
from smopd.data.prompts import Prompt, batch_indices
from smopd.engine import distributed
from smopd.engine.protocols import RolloutEngine
from smopd.engine.types import Rollout, Sampling
from smopd.step.batch import Batch, positions
from smopd.step.ends import StaleRollout, all_or_raise


class Sampler:
    """This rank's rollouts of each step. A context manager: it waits for what it has begun.

    Args:
        prompts: the training set.
        device: this rank's.
        ahead: what `settle` gave for the checkpoint that the run resumes from.
    """

    def __init__(
        self,
        settings: Settings,
        prompts: Sequence[Prompt],
        engine: RolloutEngine,
        device: torch.device,
        ahead: dict[str, Any] | None = None,
    ):
        self.settings, self.prompts, self.engine = settings, prompts, engine
        self._pool = distributed.thread("sampling", device)
        self._begun: dict[int, Future[Batch]] = {}
        if ahead is not None and settings.loop.async_level:
            rollouts = [Rollout(**values) for values in ahead["rollouts"]]
            self._begun[ahead["step"]] = self._pool.submit(self._batch, ahead["step"], rollouts)

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def take(self, step: int) -> Batch:
        """The batch of `step`. With a lag the next one is begun, unless teachers wait for its engine's turn.

        A collective call.

        Raises:
            StaleRollout, NoServer: on one rank or several, and so on every one.
        """
        return all_or_raise(lambda: self._take(step))

    def _take(self, step: int) -> Batch:
        begun = self._begun.pop(step, None)
        batch = self._batch(step) if begun is None else begun.result()
        for rollout in batch.rollouts:
            if step - rollout.policy_version > self.settings.loop.async_level:
                raise StaleRollout(
                    f"step {step}: a response comes from policy {rollout.policy_version}, "
                    f"expected {step - self.settings.loop.async_level} or later (loop.async_level)"
                )
        if not _take_turns(self.settings):
            self.begin(step + 1)
        return batch

    def begin(self, step: int) -> None:
        """With a lag, has the batch of `step` sampled with the policy of now, if that is not begun."""
        loop = self.settings.loop
        if loop.async_level and step < loop.steps and step not in self._begun:
            self._begun[step] = self._pool.submit(self._batch, step)

    def settle(self) -> dict[str, Any] | None:
        """Waits until the engine is idle; what was begun ahead, for a checkpoint. A collective call."""
        for step, begun in self._begun.items():
            return {"step": step, "rollouts": [vars(each) for each in all_or_raise(begun.result).rollouts]}
        return None

    def _batch(self, step: int, rollouts: list[Rollout] | None = None) -> Batch:
        """The batch of `step`, of `rollouts` where they are there already."""
        loop, options, n = self.settings.loop, self.settings.rollout, len(self.prompts)
        chosen = batch_indices(n, loop.prompts_per_step, step, self.settings.seed)
        first = step * loop.prompts_per_step
        groups = [(first + position) // n * n + i for position, i in enumerate(chosen)]
        prompts = [self.prompts[i] for i in chosen]
        rank, n_ranks = distributed.rank(), distributed.world_size()
        shares = positions(len(prompts), loop.updates_per_step, rank, n_ranks)
        if rollouts is None:
            mine = [position for share in shares for position in share]
            sampling = Sampling(
                n=options.group_size,
                temperature=options.temperature,
                top_p=options.top_p,
                max_new_tokens=options.max_new_tokens,
                seed=self.settings.seed,
            )
            token_ids = [prompts[i].token_ids for i in mine]
            rollouts = self.engine.generate(token_ids, [groups[i] for i in mine], sampling)
        return Batch.of(prompts, shares, rollouts, options.group_size)


def _take_turns(settings: Settings) -> bool:
    """Whether rollouts and teachers are vLLM engines of this process, of which one works at a time."""
    return settings.rollout.colocated and settings.teachers.colocated
