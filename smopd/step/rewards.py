"""Responses -> rewards: decodes them, calls every reward in its worker, stops a run that cannot be scored."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
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
        self._failures: defaultdict[str, deque[Counter[str]]] = defaultdict(
            lambda: deque(maxlen=window_steps)
        )  # by reward, of each step

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
        self._check(scored, training=step is not None)
        return Rewards(torch.from_numpy(scored.values_RK), texts, scored)

    def _check(self, scored: RewardBatch, *, training: bool) -> None:
        """A collective call."""
        ranks = distributed.gather_objects(scored)
        responses = sum(len(rank.values_RK) for rank in ranks)
        for name in scored.names:
            window = self._failures[name] if training else deque[Counter[str]]()
            window.append(sum((Counter(rank.failures[name]) for rank in ranks), Counter()))
            error = next((rank.last_errors[name] for rank in ranks if name in rank.last_errors), None)
            check_share(
                name,
                sum(window, Counter()),
                responses * (self.window_steps if training else 1),  # the first step is no whole window
                self.max_unscorable_share,
                error,
            )
