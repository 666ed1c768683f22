"""What the rewards are given beside prompts and responses."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from smopd.data.prompts import Prompt
from smopd.engine.types import Rollout
from smopd.rewards.pool import FAILURE_KINDS, RewardBatch
from smopd.step.rewards import Rewarder


class Pool:
    """Keeps the columns that it is given."""

    def score(self, prompts: list[Any], completions: list[str], columns: dict[str, Any]) -> RewardBatch:
        self.columns = columns
        none = {"r": dict.fromkeys(FAILURE_KINDS, 0)}
        return RewardBatch(("r",), np.zeros((len(completions), 1)), none, {}, {"r": 0.0}, {"r": 0})


class Tokenizer:
    def batch_decode(self, ids: list[list[int]], skip_special_tokens: bool) -> list[str]:
        return [str(each) for each in ids]


def test_the_step_is_a_column_while_training_alone() -> None:
    pool = Pool()
    rewarder = Rewarder(pool, Tokenizer(), 0.5)  # type: ignore[arg-type]
    prompts = [Prompt(i, "q", (1,), {"truth": i}) for i in range(2)]
    one = torch.tensor([5])
    rollouts = [Rollout((1,), one, torch.zeros(1), i, finished=True) for i in range(2)]
    rewarder.score(prompts, rollouts)
    assert pool.columns == {"truth": [0, 1]}
    rewarder.score(prompts, rollouts, 0)
    assert pool.columns == {"truth": [0, 1], "training_step": [0, 0]}
