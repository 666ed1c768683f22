"""Score responses: decode them, call each reward in its worker, and stop a run with too many failures."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedTokenizerBase

from smopd.config.settings import Scoring
from smopd.data.chat import response_texts
from smopd.data.prompts import Prompt
from smopd.engine import distributed
from smopd.engine.types import FAILED, Rollout
from smopd.names import IDS_COLUMN, STEP_COLUMN
from smopd.rewards.pool import RewardBatch, RewardError, RewardPool

WINDOW_STEPS = 10
"""Ours: number of training steps over which unscored responses are counted. One bad call does not end a run,
unless it is the first call and fails on every response."""


def replaced(was: RewardBatch, rows: Sequence[int], now: RewardBatch) -> RewardBatch:
    """Return `was` with the rewards at `rows` replaced by those of `now`. Failures of both are added up."""
    rewards_RK, texts = was.rewards_RK.clone(), list(was.texts)
    rewards_RK[list(rows)] = now.rewards_RK
    for row, text in zip(rows, now.texts, strict=True):
        texts[row] = text
    failures = {
        name: {kind: count + now.failures[name][kind] for kind, count in kinds.items()}
        for name, kinds in was.failures.items()
    }
    errors = {**was.last_errors, **now.last_errors}
    return replace(now, rewards_RK=rewards_RK, texts=texts, failures=failures, last_errors=errors)


@dataclass
class Rewarder:
    """Scorer of responses with the recipe's rewards."""

    pool: RewardPool
    tokenizer: PreTrainedTokenizerBase
    scoring: Scoring
    """The limit on unscored responses applies to a window of training steps or, outside training, a batch."""
    window_steps: int = 1

    def __post_init__(self) -> None:
        self._failures = defaultdict[str, deque[Counter[str]]](lambda: deque(maxlen=self.window_steps))
        self._responses = deque[int](maxlen=self.window_steps)

    def score(
        self,
        prompts: Sequence[Prompt],
        rollouts: Sequence[Rollout],
        step: int | None = None,
        *,
        check: bool = True,
    ) -> RewardBatch:
        """Score each rollout. This is a collective call, unless `check` is False.

        Args:
            prompts: one per rollout. A conversation whose environment failed is left unscored.
            step: training step from 0, passed to the rewards as a column, or None outside of training.
            check: whether to count unscored responses. Pass False if they replace others.
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
        return scored

    def _check(self, scored: RewardBatch, *, training: bool) -> None:
        """Raise RewardError if a dimension left too many responses unscored. This is a collective call."""
        ranks = distributed.gather_objects(replace(scored, texts=()))
        responses = sum(len(rank.rewards_RK) for rank in ranks)
        share = self.scoring.max_unscorable_share
        allowed, steps, limit = share * responses, "", f"scoring.max_unscorable_share {share:g}"
        if training:
            self._responses.append(responses)
            n = len(self._responses)
            missing = (self.window_steps - n) * responses  # in steps that are still to come
            responses = sum(self._responses)
            allowed = share * (responses + missing)
            steps, limit = f" in {n} step{'s' * (n > 1)}", f"{limit} of {self.window_steps} steps"
        for name in scored.names:
            window = self._failures[name] if training else deque[Counter[str]]()
            window.append(sum((Counter(rank.failures[name]) for rank in ranks), Counter()))
            failures = sum(window, Counter())
            unscorable = failures.total()
            errors = unscorable - failures["none"]
            broken = training and len(window) == 1 and 0 < errors == responses
            if unscorable > allowed or (broken and share < 1):
                kinds = ", ".join(f"{kind} {count}" for kind, count in failures.items())
                error = next((rank.last_errors[name] for rank in ranks if name in rank.last_errors), None)
                raise RewardError(
                    f"reward {name!r} left {unscorable} of {responses} responses unscored{steps} "
                    f"({allowed:g} allowed, {limit}): {kinds}. Last error: {error or 'none'}"
                )


def without_failed(scored: RewardBatch, rollouts: Sequence[Rollout]) -> RewardBatch:
    """Return the batch without the scores of conversations whose environment failed."""
    failed_R = torch.tensor([rollout.ended in FAILED for rollout in rollouts], dtype=torch.bool)
    rewards_RK = scored.rewards_RK.masked_fill(failed_R[:, None], torch.nan)
    lost_K = rewards_RK.isnan().sum(0) - scored.rewards_RK.isnan().sum(0)
    lost = dict(zip(scored.names, lost_K.tolist(), strict=True))
    failures = {name: {**kinds, "environment": lost[name]} for name, kinds in scored.failures.items()}
    return replace(scored, rewards_RK=rewards_RK, failures=failures)
