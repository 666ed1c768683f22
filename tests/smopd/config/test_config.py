"""Settings: what is refused, what a run's own settings are, and that all cross-checks speak at once."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from smopd.config.settings import Opd, Reward, Settings
from smopd.engine.settings import Lora, TrainSettings

REWARDS = [{"name": "a", "function": "m:f"}, {"name": "b", "function": "m:g", "weight": 2}]
TEACHERS = [{"model": "one", "reward": "a"}, {"model": "two", "reward": "b"}]


def values(**changes: Any) -> dict[str, Any]:
    return {
        "name": "tiny",
        "model": {"factory": "m:model"},
        "data": {"train": {"source": "m:prompts"}},
        "rewards": REWARDS,
        "runs": {"one": {"stage": "specialize", "reward_weights": [0.9, 0.1]}, "two": {"stage": "train"}},
        **changes,
    }


def errors(**changes: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        Settings.model_validate(values(**changes))
    return str(caught.value)


def test_a_run_takes_its_own_settings_and_leaves_the_others_alone() -> None:
    runs = {
        "one": {"stage": "train", "set": {"opd": {"kappa": 4, "gate": {"floor": 0.1}}}},
        "two": {"stage": "train"},
    }
    settings = Settings.model_validate(values(runs=runs, opd={"kappa": 8, "tail": True}))
    one, two = settings.resolved("one"), settings.resolved("two")
    assert (one.opd.kappa, one.opd.gate.floor, one.opd.tail) == (4, 0.1, True)
    assert (two.opd.kappa, two.opd.gate.floor) == (8, 0.2)
    assert settings.opd.kappa == 8


def test_a_run_is_resolved_once_and_again_for_a_copy_that_differs() -> None:
    settings, same = (Settings.model_validate(values()) for _ in range(2))
    own = settings.resolved("one")
    assert settings.resolved("one") is own
    assert settings == same and settings.model_dump() == same.model_dump()
    changed = settings.model_copy(update={"seed": 7})
    assert changed.resolved("one").seed == 7 and settings.resolved("one").seed == 0


def test_weights_are_the_profile_or_the_rewards_own() -> None:
    settings = Settings.model_validate(values())
    assert settings.weights("one") == [0.9, 0.1]
    assert settings.weights("two") == [1.0, 2.0]


@pytest.mark.parametrize("value", [True, float("nan"), float("inf"), "x", None, 1.5, 0, 129])
def test_kappa_refuses(value: object) -> None:
    with pytest.raises(ValidationError):
        Opd.model_validate({"kappa": value})


def test_numbers_in_text_form_are_numbers_and_numbers_are_text_where_text_is_expected() -> None:
    assert TrainSettings.model_validate({"learning_rate": "1e-6"}).learning_rate == 1e-6
    assert Settings.model_validate(values(name=2024)).name == "2024"


@pytest.mark.parametrize("changes", [{"rank": 0}, {"alpha": 0}, {"dropout": 1}, {"dropout": -0.1}])
def test_adapters_have_a_rank_and_a_scale_and_drop_less_than_all(changes: dict[str, float]) -> None:
    with pytest.raises(ValidationError, match=next(iter(changes))):
        Lora.model_validate(changes)


@pytest.mark.parametrize(
    "function", ["module", "module.function", "module:", ":f", "a b:f", "a.b:c.", "1a:f"]
)
def test_import_paths_have_one_shape(function: str) -> None:
    with pytest.raises(ValidationError, match=r"package\.module:function"):
        Reward(name="a", function=function)


def test_all_cross_checks_speak_at_once() -> None:
    text = errors(
        runs={
            "one": {"stage": "train", "init": "two", "reward_weights": [1]},
            "two": {"stage": "train"},
            "base": {"stage": "train"},
        },
        teachers={"models": [{"model": "one", "reward": "c"}]},
    )
    assert "runs.one.init: 'two' is no earlier run" in text
    assert "runs.one.reward_weights: got 1 weights" in text
    assert "runs.base: 'base' names the starting model" in text
    assert "teachers.models.0.reward: 'c'" in text


def test_a_gate_needs_ranges_and_a_floor_that_leaves_room() -> None:
    gate = {"gate": {"kind": "token", "floor": 0.6}}
    text = errors(opd=gate, teachers={"models": TEACHERS})
    assert "opd.gate.floor: 0.6 times 2 teachers exceeds 1" in text
    assert "rewards.0.range" in text and "rewards.1.range" in text
    ranged = [{**reward, "range": [0, 1]} for reward in REWARDS]
    gate["gate"]["floor"] = 0.5
    Settings.model_validate(values(opd=gate, teachers={"models": TEACHERS}, rewards=ranged))


SERVERS = {"engine": "vllm", "urls": ["http://a:1"]}
REMOTE = [{"model": "http://a:1", "reward": "a"}, {"model": "http://b:1", "reward": "b"}]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {}}, "exactly one of path and factory"),
        ({"model": {"path": "x", "factory": "m:f"}}, "exactly one of path and factory"),
        ({"output": "runs/{time}"}, "expected a folder in which only {name} stands in braces"),
        *(
            ({"runs": {name: {"stage": "train"}}}, "letters, digits")
            for name in ("a/b", "a.b", "", "..", "a b")
        ),
        *(
            ({"runs": {"one": {"stage": "train", "set": {key: "x"}}}}, f"{key} cannot differ")
            for key in ("name", "output", "runs")
        ),
        ({"rewards": [{"name": "a", "function": "m:f", "range": [3, -3]}]}, "lo < hi"),
        *(
            (
                {"rewards": [{"name": "a", "function": "m:f", "kwargs": {key: 1}}]},
                f"got {key}, which every call",
            )
            for key in ("prompts", "completions", "training_step")
        ),
        (
            {"loop": {"prompts_per_step": 4, "updates_per_step": 5}},
            "updates_per_step: got 5, expected at most prompts_per_step (4)",
        ),
        ({"loop": {"async_level": 1}}, "loop.async_level: with 1 the responses come from an earlier policy"),
        ({"rollout": {"urls": ["http://a:1"]}}, "rollout.urls: are of vLLM servers"),
        (
            {"rollout": {**SERVERS, "vllm": {"engine_kwargs": {"max_model_len": 9}}}},
            "rollout.vllm.engine_kwargs: is of an engine here",
        ),
        (
            {"rollout": {"engine": "vllm", "vllm": {"transfer": "ipc"}}},
            "rollout.vllm.transfer: ipc is of an engine in a process of its own",
        ),
        ({"teachers": {"models": [TEACHERS[0], REMOTE[1]]}}, "got teachers at URLs and others"),
        ({"student": {"strategy": "deepspeed", "shard_size": 2}}, "student.shard_size: is FSDP2's"),
        ({"student": {"deepspeed_config": "zero.json"}}, "student.deepspeed_config: is DeepSpeed's"),
        (
            {"student": {"strategy": "deepspeed", "optimizer": "m:f"}},
            "student.optimizer: DeepSpeed's is adamw alone",
        ),
        (
            {"opd": {"target": "m:f", "divergence": "reverse_kl_sampled"}},
            "opd.target: got m:f, but reverse_kl_sampled has a target of its own",
        ),
        ({"advantage": {"snr_threshold": 0.2}}, "advantage.snr_threshold: is GD2PO's"),
        (
            {"rollout": {"top_p": 0.9}, "loss": {"importance_cap": 2.0}},
            "rollout.top_p: at 0.9 the sampler's log-probabilities are the nucleus's",
        ),
        (
            {"rollout": {"top_p": 0.9}, "opd": {"divergence": "reverse_kl_sampled"}},
            "rollout.top_p: at 0.9 tokens come from the nucleus, and opd.divergence's KL",
        ),
        (
            {"rollout": {"top_p": 0.9}, "kl_ref": {"coef": 0.1}},
            "rollout.top_p: at 0.9 tokens come from the nucleus, and kl_ref's KL",
        ),
        (
            {
                "loop": {"async_level": 1},
                "loss": {"old_logps": "rollout"},
                "rollout": {"engine": "vllm", "vllm": {"engine_kwargs": {"tensor_parallel_size": 2}}},
            },
            "where the collectives of colocated tensor-parallel",
        ),
        ({"kl_ref": {"coef": 0.1, "place": "reward"}}, "kl_ref.place: gdpo normalises each reward"),
        (
            {
                "kl_ref": {"coef": 0.1},
                "opd": {"divergence": "reverse_kl_sampled", "reverse_kl_surrogate": "ppo"},
            },
            "opd.reverse_kl_surrogate: with ppo the teachers' term and kl_ref's",
        ),
    ],
)
def test_what_does_not_go_together_is_said_before_anything_runs(changes: dict, message: str) -> None:
    assert message in errors(**changes)
