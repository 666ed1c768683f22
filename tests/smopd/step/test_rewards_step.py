"""What the rewards are given beside prompts and responses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from smopd.data.prompts import Prompt
from smopd.engine.types import Rollout
from smopd.rewards.pool import FAILURE_KINDS, RewardBatch, RewardError
from smopd.step.rewards import Rewarder

PROMPT = Prompt(0, "q", (1,), {})
ROLLOUT = Rollout((1,), torch.tensor([5]), torch.zeros(1), 0, finished=True)


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


def scored(failures: int, responses: int = 4) -> RewardBatch:
    kinds = dict.fromkeys(FAILURE_KINDS, 0) | {"exception": failures}
    values = np.ones((responses, 1))
    values[:failures] = np.nan
    return RewardBatch(("tone",), values, {"tone": kinds}, {"tone": "broken"}, {"tone": 0.0}, {"tone": 0})


@pytest.mark.parametrize(
    ("failures", "ends_after"),
    [
        ([4, 4, 4], 3),  # half of four steps may be without a score, the first ones too
        ([4, 0, 0, 0, 4, 0], None),  # a bad call now and then
        ([0, 4, 4, 0, 0], None),
        ([0] * 6 + [4] * 5, 9),  # more than half of the last four steps
        ([2] * 20, None),
    ],
)
def test_a_bad_step_is_counted_over_a_window(failures, ends_after):
    batches = iter([scored(count) for count in failures])
    pool = SimpleNamespace(score=lambda *_: next(batches))
    rewarder = Rewarder(pool, Tokenizer(), 0.5, window_steps=4)
    prompts, rollouts = [PROMPT] * 4, [ROLLOUT] * 4
    for step in range(ends_after - 1 if ends_after else len(failures)):
        rewarder.score(prompts, rollouts, step)
    if ends_after:
        with pytest.raises(RewardError, match=r"'tone' left .* Last error: broken"):
            rewarder.score(prompts, rollouts, ends_after - 1)


def test_an_evaluation_is_judged_alone():
    pool = SimpleNamespace(score=lambda *_: scored(3))
    rewarder = Rewarder(pool, Tokenizer(), 0.5, window_steps=4)
    with pytest.raises(RewardError, match="left 3 of 4 responses"):
        rewarder.score([PROMPT] * 4, [ROLLOUT] * 4)
