"""Reward responses: decode them, call every reward in its worker, stop a run with too many unscored ones."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from smopd.config.settings import Scoring
from smopd.data.chat import response_texts
from smopd.data.prompts import Prompt
from smopd.engine import distributed
from smopd.engine.types import FAILED, Rollout
from smopd.names import IDS_COLUMN, STEP_COLUMN
from smopd.rewards.pool import RewardBatch, RewardError, RewardPool

WINDOW_STEPS = 10
"""Ours: unscored responses are counted over this many training steps, so one bad call does not end a run."""


@dataclass(frozen=True)
class Rewards:
    """Rewards of R responses in K dimensions on this rank."""

    rewards_RK: Tensor
    """float64; NaN if a reward could not score a response."""
    texts: list[str]
    """The responses as the rewards see them."""
    batch: RewardBatch

    def replaced(self, rows: Sequence[int], new: Rewards) -> Rewards:
        """Return the rewards with `new` at `rows`; failures are added up."""
        rewards_RK, texts = self.rewards_RK.clone(), list(self.texts)
        rewards_RK[list(rows)] = new.rewards_RK
        for row, text in zip(rows, new.texts, strict=True):
            texts[row] = text
        was, now = self.batch, new.batch
        batch = replace(
            now,
            values_RK=rewards_RK.numpy(),
            failures={
                name: {kind: count + now.failures[name][kind] for kind, count in was.failures[name].items()}
                for name in now.names
            },
            last_errors={**was.last_errors, **now.last_errors},
        )
        return Rewards(rewards_RK, texts, batch)


@dataclass
class Rewarder:
    """Scores responses with the recipe's rewards."""

    pool: RewardPool
    tokenizer: PreTrainedTokenizerBase
    scoring: Scoring
    """Its limit of unscored responses holds for a window of training steps, and for each other batch."""
    window_steps: int = 1

    def __post_init__(self) -> None:
        self._failures = defaultdict[str, deque[Counter[str]]](lambda: deque(maxlen=self.window_steps))

    def score(
        self,
        prompts: Sequence[Prompt],
        rollouts: Sequence[Rollout],
        step: int | None = None,
        *,
        check: bool = True,
    ) -> Rewards:
        """Score each rollout; a collective call, unless `check` is False.

        Args:
            prompts: one per rollout. A conversation whose environment failed is left unscored.
            step: training step from 0, passed to the rewards as a column; None outside of training.
            check: count unscored responses. False for those in place of others of the step.
        Raises:
            RewardError: a dimension left too many responses of all ranks unscored. Raised on every rank.
        """
        decoded = response_texts(self.tokenizer, rollouts, special_tokens=self.scoring.special_tokens)
        texts = [prompt.response_start + text for prompt, text in zip(prompts, decoded, strict=True)]
        names = sorted({name for prompt in prompts for name in prompt.columns})
        columns = {name: [prompt.columns.get(name) for prompt in prompts] for name in names}
        columns[IDS_COLUMN] = [rollout.response_ids.tolist() for rollout in rollouts]
        if step is not None:
            columns[STEP_COLUMN] = [step] * len(prompts)
        spoken = [list(rollout.messages) or None for rollout in rollouts]
        scored = self.pool.score([prompt.content for prompt in prompts], texts, columns, spoken)
        scored = without_failed(scored, rollouts)
        if check:
            self._check(scored, training=step is not None)
        return Rewards(torch.from_numpy(scored.values_RK), texts, scored)

    def _check(self, scored: RewardBatch, *, training: bool) -> None:
        """Raise RewardError if a dimension is over the limit; a collective call."""
        ranks = distributed.gather_objects(scored)
        steps = self.window_steps if training else 1  # the first steps count as a full window
        responses = steps * sum(len(rank.values_RK) for rank in ranks)
        for name in scored.names:
            window = self._failures[name] if training else deque[Counter[str]]()
            window.append(sum((Counter(rank.failures[name]) for rank in ranks), Counter()))
            failures = sum(window, Counter())
            unscorable = failures.total()
            if unscorable > self.scoring.max_unscorable_share * responses:
                kinds = ", ".join(f"{kind} {count}" for kind, count in failures.items())
                error = next((rank.last_errors[name] for rank in ranks if name in rank.last_errors), None)
                raise RewardError(
                    f"reward {name!r} left {unscorable} of {responses} responses unscored (share "
                    f"{unscorable / responses:.3f}, limit {self.scoring.max_unscorable_share:g}): {kinds}. "
                    f"Last error: {error or 'none'}"
                )


def without_failed(scored: RewardBatch, rollouts: Sequence[Rollout]) -> RewardBatch:
    """Return the batch without scores of conversations whose environment failed."""
    failed_R1 = np.array([[rollout.ended in FAILED] for rollout in rollouts], dtype=bool).reshape(-1, 1)
    values_RK = np.where(failed_R1, np.nan, scored.values_RK)
    lost_K = np.isnan(values_RK).sum(0) - np.isnan(scored.values_RK).sum(0)
    lost = dict(zip(scored.names, lost_K.tolist(), strict=True))
    failures = {name: {**kinds, "environment": lost[name]} for name, kinds in scored.failures.items()}
    return replace(scored, values_RK=values_RK, failures=failures)
