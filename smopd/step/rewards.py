"""Responses -> rewards.

Decodes them, calls every reward in its worker, and stops a run that cannot be scored.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from smopd.data.prompts import Prompt
from smopd.engine import distributed
from smopd.engine.types import Rollout
from smopd.names import STEP_COLUMN
from smopd.rewards.pool import RewardBatch, RewardPool, check_share

WINDOW_STEPS = 10
"""Ours: the last steps whose responses are counted together: a bad call among good ones ends no run."""


@dataclass(frozen=True)
class Rewards:
    """Rewards of R responses in K dimensions on this rank."""

    rewards_RK: Tensor
    """float64, NaN where a reward could not score."""
    texts: list[str]
    """The responses without special tokens, as the rewards saw them."""
    batch: RewardBatch


@dataclass(frozen=True)
class Counted:
    """One step's unscorable responses over all ranks, by reward and kind, and an error of each reward."""

    responses: int
    failures: dict[str, Counter[str]]
    errors: dict[str, str]


class Rewarder:
    """Rewards responses with the recipe's rewards.

    Args:
        pool: one killable worker a reward.
        tokenizer: of the policy.
        max_unscorable_share: a dimension that leaves more than this share unscored ends the run: of the
            responses of `window_steps` steps of training, the last ones, of one batch elsewhere.
    """

    def __init__(
        self,
        pool: RewardPool,
        tokenizer: PreTrainedTokenizerBase,
        max_unscorable_share: float,
        window_steps: int = 1,
    ):
        self.pool = pool
        self.tokenizer = tokenizer
        self.max_unscorable_share = max_unscorable_share
        self.window_steps = window_steps
        self._window: deque[Counted] = deque(maxlen=window_steps)

    def score(
        self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout], step: int | None = None
    ) -> Rewards:
        """Rewards each rollout of `prompts`, one prompt a rollout; a collective call.

        Args:
            step: of training, from 0, which the rewards get as a column; None outside of training.
        Raises:
            RewardError: on every rank, when over all ranks a dimension could not score too many responses, in
                the window of steps or outside of training.
        """
        ids = [rollout.response_ids.tolist() for rollout in rollouts]
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True) if ids else []
        names = sorted({name for prompt in prompts for name in prompt.columns})
        columns = {name: [prompt.columns.get(name) for prompt in prompts] for name in names}
        if step is not None:
            columns[STEP_COLUMN] = [step] * len(prompts)
        scored = self.pool.score([prompt.content for prompt in prompts], texts, columns)
        counted = self._counted(scored, len(rollouts))
        counts, steps = [counted], 1
        if step is not None:
            self._window.append(counted)
            counts, steps = list(self._window), self.window_steps  # the first step is no whole window
        responses = counted.responses * steps
        for name in scored.names:
            failures = sum((count.failures[name] for count in counts), Counter())
            check_share(name, failures, responses, self.max_unscorable_share, counted.errors.get(name))
        return Rewards(torch.from_numpy(scored.values_RK), texts, scored)

    def _counted(self, scored: RewardBatch, n_responses: int) -> Counted:
        """Of all ranks; a collective call."""
        failed = {name: Counter(kinds) for name, kinds in scored.failures.items()}
        ranks = distributed.gather_objects(Counted(n_responses, failed, dict(scored.last_errors)))
        return Counted(
            responses=sum(rank.responses for rank in ranks),
            failures={name: sum((rank.failures[name] for rank in ranks), Counter()) for name in scored.names},
            errors={name: error for rank in reversed(ranks) for name, error in rank.errors.items()},
        )
