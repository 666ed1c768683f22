"""What the engines are made with."""

from __future__ import annotations

from smopd.config.settings import Settings, merged
from smopd.run.build import rollout_settings
from tests.smopd.run.invariance_worker import SETTINGS

LIMIT = 4096


def adapter(rank: int, **more) -> dict:
    return {"stage": "control", "set": {"student": {"lora": {"rank": rank}}, **more}}


def test_runs_share_the_engines_that_they_can() -> None:
    runs = {
        "short": {"stage": "control", "set": {"rollout": {"max_new_tokens": 64}}},
        "long": {"stage": "control", "set": {"rollout": {"max_new_tokens": 128}}},
        "small": adapter(8),
        "large": adapter(16, rollout={"max_new_tokens": 32}),
    }
    changes = {"data": {"max_prompt_tokens": 100}, "rollout": {"engine": "vllm", "max_new_tokens": 16}}
    recipe = Settings.model_validate(merged(SETTINGS, {**changes, "runs": runs}))
    made = {name: rollout_settings(recipe.resolved(name), recipe, LIMIT) for name in runs}
    assert made["short"] == made["long"] and made["small"] == made["large"]
    assert {own.max_model_len for own in made.values()} == {100 + 128}
    assert (made["short"].max_lora_rank, made["small"].max_lora_rank) == (0, 16)


def test_one_run_is_not_asked_for_more_than_the_model_has() -> None:
    runs = {
        "short": {"stage": "control", "set": {"rollout": {"max_new_tokens": 64}}},
        "far": {"stage": "control", "set": {"rollout": {"max_new_tokens": 10 * LIMIT}}},
    }
    recipe = Settings.model_validate(merged(SETTINGS, {"runs": runs}))
    assert rollout_settings(recipe.resolved("short"), recipe, LIMIT).max_model_len == LIMIT


def test_evaluation_may_need_more_room_than_training() -> None:
    changes = {
        "data": {"max_prompt_tokens": 100, "max_evaluation_tokens": 80},
        "rollout": {"max_new_tokens": 16},
    }
    for new, longest in ((None, 116), (30, 116), (50, 130)):
        values = merged(SETTINGS, {**changes, "evaluation": {"max_new_tokens": new}})
        assert Settings.model_validate(values).longest_sequence == longest
