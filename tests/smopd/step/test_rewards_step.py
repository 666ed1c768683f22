"""What the rewards are given beside prompts and responses, and when too few of them score."""

from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from smopd.config.cli import read_settings
from smopd.config.settings import Reward, Scoring
from smopd.data.prompts import Prompt
from smopd.engine import distributed
from smopd.engine.types import Rollout, Sampling
from smopd.rewards.pool import FAILURE_KINDS, RewardBatch, RewardError, RewardPool
from smopd.run.preflight import try_rewards
from smopd.step import held_out
from smopd.step.held_out import means
from smopd.step.rewards import Rewarder, replaced
from tests.smopd.recipes import TINY
from tests.smopd.rewards.tiny_preference import byte_tokenizer
from tests.smopd.run.invariance_worker import settings_of

ROLLOUT = Rollout((1,), torch.tensor([5]), torch.zeros(1), 0, finished=True)
PROMPTS = [Prompt(i, "q", (1,), {"truth": i}) for i in range(4)]


def has_call(completions: list[str], **columns: object) -> list[float]:
    return [float(text.index("</tool_call>") > 0) for text in completions]


class Tokenizer:
    all_special_ids: ClassVar[list[int]] = []

    def batch_decode(self, ids: list[list[int]], skip_special_tokens: bool) -> list[str]:
        return [str(each) for each in ids]


def scored(failures: int) -> RewardBatch:
    """Of four responses."""
    kinds = dict.fromkeys(FAILURE_KINDS, 0) | {"exception": failures}
    rewards_RK = torch.tensor([[torch.nan]] * failures + [[1.0]] * (4 - failures))
    return RewardBatch(("tone",), rewards_RK, "abcd", {"tone": kinds}, {"tone": "broken"}, {"tone": 0})


def rewarder(score, **options) -> Rewarder:
    return Rewarder(SimpleNamespace(score=score), Tokenizer(), Scoring(), **options)  # type: ignore[arg-type]


def test_the_step_is_a_column_while_training_alone() -> None:
    given: list[dict] = []
    own = rewarder(lambda prompts, texts, columns, spoken: given.append(columns) or scored(0))
    own.score(PROMPTS, [ROLLOUT] * 4)
    own.score(PROMPTS, [ROLLOUT] * 4, 0)
    always = {"truth": [0, 1, 2, 3], "completion_ids": [[5]] * 4}
    assert given == [always, always | {"training_step": [0] * 4}]


@pytest.mark.parametrize(
    ("failures", "ends_after"),
    [
        ([4], 1),  # the first call, as a whole
        ([3, 4, 2], 3),  # half of four steps may be without a score, the first ones too
        ([3, 0, 0, 0, 4, 0], None),  # a bad call now and then
        ([0] * 6 + [4] * 5, 9),  # more than half of the last four steps
        ([2] * 20, None),
    ],
)
def test_a_bad_step_is_counted_over_a_window(failures, ends_after):
    batches = iter([scored(count) for count in failures])
    own = rewarder(lambda *_: next(batches), window_steps=4)
    for step in range(ends_after - 1 if ends_after else len(failures)):
        own.score(PROMPTS, [ROLLOUT] * 4, step)
    if ends_after:
        most, of = sum(failures[:ends_after][-4:]), 4 * min(ends_after, 4)
        message = rf"'tone' left {most} of {of} .*\(8 allowed, .* 0\.5 of 4 steps\): exception {most}\. Last"
        with pytest.raises(RewardError, match=message):
            own.score(PROMPTS, [ROLLOUT] * 4, ends_after - 1)
    alone = rewarder(lambda *_: scored(3), window_steps=4)
    with pytest.raises(RewardError, match="left 3 of 4 responses"):
        alone.score(PROMPTS, [ROLLOUT] * 4)  # an evaluation


def test_what_another_rank_or_a_replaced_response_left_unscored_counts(monkeypatch):
    assert replaced(scored(2), range(4), scored(1)).failures["tone"]["exception"] == 3
    monkeypatch.setattr(distributed, "gather_objects", lambda own: [own, scored(4)])
    with pytest.raises(RewardError, match="left 5 of 8 responses"):
        rewarder(lambda *_: scored(1)).score(PROMPTS, [ROLLOUT] * 4, 0)


def test_a_ranks_draws_are_those_of_its_own_prompts(monkeypatch):
    asked = []
    monkeypatch.setattr(distributed, "rank", lambda: 1)
    monkeypatch.setattr(held_out, "sample", lambda *given: asked.extend(given[3]) or [ROLLOUT] * 3)
    held_out.answers(PROMPTS, None, SimpleNamespace(score=lambda *_: scored(0)), Sampling())
    assert asked == [1, 2, 3]


def test_tags_that_are_special_tokens_or_prefilled_are_scored(capsys):
    tokenizer, tags = byte_tokenizer(), ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    tokenizer.add_special_tokens({"extra_special_tokens": tags})
    truth = '<think> ok </think>\n<tool_call>\n{"name": "w", "parameters": {"c": 1}}\n</tool_call>'
    prompt = Prompt(0, "q", (1,), {"ground_truth": truth}, response_start="<think>")
    ids = torch.tensor(tokenizer(truth.removeprefix("<think>") + tokenizer.eos_token)["input_ids"])
    rollout = Rollout((1,), ids, torch.zeros(len(ids)), 0, finished=True)
    rewards = [Reward.model_validate(reward) for reward in TINY["rewards"]]
    own = Reward(name="call", function=f"{__name__}:has_call")
    with RewardPool(rewards) as pool, RewardPool([own]) as raises_on_an_empty_answer:
        scored = Rewarder(pool, tokenizer, Scoring()).score([prompt], [rollout])
        assert scored.texts == [truth] and scored.rewards_RK.tolist() == [[3.0, 1.0]]
        bare = Rewarder(pool, tokenizer, Scoring(special_tokens=False)).score([prompt], [rollout])
        assert not {"<tool_call>", "</think>"} & {*bare.texts[0].split()}
        verls = replace(prompt, columns={"reward_model": {"ground_truth": truth}})
        assert try_rewards(pool, read_settings("quickstart"), tokenizer, verls) == {}
        found = try_rewards(raises_on_an_empty_answer, read_settings("quickstart"), tokenizer, verls)
        assert found == {"call": False}
    out = capsys.readouterr().out
    assert "call on the first prompt: 1 for the text of" in out and "an empty answer (ValueError: sub" in out
    truth = "for the text of its column 'ground_truth'"
    assert f"accuracy on the first prompt: 3 {truth}, -3 for an empty answer" in out
    assert f"format on the first prompt: 1 {truth}, 0 for an empty answer" in out


def test_the_means_of_an_evaluation_leave_out_what_has_no_score():
    rewards = [{"a": 1.0, "b": None}, {"a": None, "b": None}, {"a": 2.0, "b": None}, {"a": 3.0, "b": None}]
    items = [{"rewards": each, "finished": i > 0} for i, each in enumerate(rewards)]
    expected = {"a": 2.0, "a/unscorable": 0.25, "b": None, "b/unscorable": 1.0}
    assert means(["a", "b"], items) == {**expected, "sum": None, "truncated": 0.25}
    assert means(["a"], items)["sum"] == 2.0


def test_the_runs_seed_draws_the_sampled_answers(monkeypatch):
    seeds = []
    monkeypatch.setattr(held_out, "answers", lambda *given: seeds.append(given[3].seed) or [])
    monkeypatch.setattr(held_out, "means", lambda *_: {})
    for seed in (0, 1):
        held_out.evaluate_held_out(settings_of(seed=seed), [], None, None)
    assert len(set(seeds)) == 3, "greedy answers need no seed"
