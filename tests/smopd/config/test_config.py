"""Settings: what is refused, what a run's own settings are, and that all cross-checks speak at once."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from smopd.config.settings import Loop, Opd, Reward, Settings, merged
from smopd.engine.settings import Lora, TrainSettings

REWARDS = [{"name": "a", "function": "m:f"}, {"name": "b", "function": "m:g", "weight": 2}]
TEACHERS = [{"model": "one", "reward": "a"}, {"model": "two", "reward": "b"}]


def values(**changes: Any) -> dict[str, Any]:
    return {
        "name": "tiny",
        "model": {"factory": "m:model"},
        "data": {"train": {"source": "m:prompts"}},
        "rewards": REWARDS,
        "runs": {"one": {"stage": "specialize", "reward_weights": [0.9, 0.1]}, "two": {"stage": "control"}},
        **changes,
    }


def errors(**changes: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        Settings.model_validate(values(**changes))
    return str(caught.value)


def test_a_run_takes_its_own_settings_and_leaves_the_others_alone() -> None:
    runs = {
        "one": {"stage": "control", "set": {"opd": {"kappa": 4, "gate": {"blend": 0.1}}}},
        "two": {"stage": "control"},
    }
    settings = Settings.model_validate(values(runs=runs, opd={"kappa": 8, "tail": False}))
    one, two = settings.resolved("one"), settings.resolved("two")
    assert (one.opd.kappa, one.opd.gate.blend, one.opd.tail) == (4, 0.1, False)
    assert (two.opd.kappa, two.opd.gate.blend) == (8, 0.5)
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


def test_merged_replaces_lists_and_keeps_the_base() -> None:
    base = {"a": {"b": [1, 2], "c": 3}, "d": 4}
    assert merged(base, {"a": {"b": [9]}, "e": {"f": 1}}) == {"a": {"b": [9], "c": 3}, "d": 4, "e": {"f": 1}}
    assert base == {"a": {"b": [1, 2], "c": 3}, "d": 4}


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


def test_reward_range_is_ordered() -> None:
    assert Reward(name="a", function="m:f", range="batch").range == "batch"
    with pytest.raises(ValidationError, match="lo < hi"):
        Reward(name="a", function="m:f", range=(3, -3))


def test_no_mini_batch_is_empty() -> None:
    assert Loop(prompts_per_step=4, updates_per_step=4).updates_per_step == 4
    with pytest.raises(
        ValidationError, match=r"updates_per_step: got 5, expected at most prompts_per_step \(4\)"
    ):
        Loop(prompts_per_step=4, updates_per_step=5)


@pytest.mark.parametrize("model", [{}, {"path": "x", "factory": "m:f"}])
def test_a_model_has_one_origin(model: dict[str, str]) -> None:
    assert "exactly one of path and factory" in errors(model=model)


@pytest.mark.parametrize("key", ["name", "output", "runs"])
def test_a_run_cannot_change_what_belongs_to_the_recipe(key: str) -> None:
    assert f"{key} cannot differ" in errors(runs={"one": {"stage": "control", "set": {key: "x"}}})


@pytest.mark.parametrize("name", ["a/b", "a.b", "", "..", "a b"])
def test_a_run_name_is_a_folder_and_a_part_of_a_path(name: str) -> None:
    assert "letters, digits" in errors(runs={name: {"stage": "control"}})


def test_output_has_only_the_name_in_braces() -> None:
    assert "braces" in errors(output="runs/{time}")


def test_all_cross_checks_speak_at_once() -> None:
    text = errors(
        runs={
            "one": {"stage": "control", "init": "two", "reward_weights": [1]},
            "two": {"stage": "control"},
            "base": {"stage": "control"},
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


VLLM_ROUTE = {"models": TEACHERS, "engine": "vllm", "route": "prompt_logprobs"}
SERVERS = {"engine": "vllm", "urls": ["http://a:1"]}
REMOTE = [{"model": "http://a:1", "reward": "a"}, {"model": "http://b:1", "reward": "b"}]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loop": {"lag": 1}}, "loop.lag: with 1 the responses come from an earlier policy"),
        ({"rollout": {"urls": ["http://a:1"]}}, "rollout.urls: are of vLLM servers"),
        (
            {"rollout": {**SERVERS, "vllm": {"gpu_memory_share": 0.5}}},
            "rollout.vllm.gpu_memory_share: is of an engine here",
        ),
        (
            {"rollout": {"engine": "vllm", "vllm": {"transfer": "ipc"}}},
            "rollout.vllm.transfer: ipc is of an engine in a process of its own",
        ),
        (
            {"teachers": {"models": TEACHERS, "engine": "vllm", "vllm": {"transfer": "ipc"}}},
            "teachers.vllm.transfer: ipc is of an engine in a process of its own",
        ),
        (
            {"rollout": SERVERS, "remote": {"transfer": "nccl", "transfer_folder": "/shared"}},
            "remote.transfer_folder: is of the transfer by files, remote.transfer is nccl",
        ),
        ({"teachers": {"models": [TEACHERS[0], REMOTE[1]]}}, "got teachers at URLs and others"),
        ({"teachers": VLLM_ROUTE, "opd": {"temperature": 0.7}}, "temperature 1 alone, the KL's is 0.7"),
        ({"teachers": {**VLLM_ROUTE, "union": True}}, "teachers.union: needs the pooler route"),
        (
            {"teachers": VLLM_ROUTE, "rollout": {"temperature": 0.7}, "kl_ref": {"coef": 0.1}},
            "kl_ref's is the rollout's, 0.7",
        ),
        ({"student": {"strategy": "deepspeed", "shard_size": 2}}, "student.shard_size: is FSDP2's"),
        ({"student": {"deepspeed_config": "zero.json"}}, "student.deepspeed_config: is DeepSpeed's"),
        ({"student": {"row_tokens": 9000, "micro_batch_tokens": 8192}}, "student.row_tokens: 9000 are more"),
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
                "loop": {"lag": 1},
                "loss": {"old_logps": "rollout"},
                "rollout": {"engine": "vllm", "vllm": {"tensor_parallel_size": 2}},
            },
            "colocated tensor-parallel engines would cross",
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


def test_engines_and_servers_take_what_is_theirs() -> None:
    Settings.model_validate(values(rollout={**SERVERS, "dtype": "bfloat16"}, remote={"transfer": "nccl"}))
    Settings.model_validate(values(rollout=SERVERS, remote={"transfer_folder": "/shared"}))
    own = {"placement": "process", "transfer": "ipc"}
    Settings.model_validate(values(rollout={"engine": "vllm", "vllm": own}))


def test_prompt_logprobs_serve_temperature_one() -> None:
    Settings.model_validate(values(teachers=VLLM_ROUTE, rollout={"temperature": 0.7}))
    Settings.model_validate(values(teachers=VLLM_ROUTE, kl_ref={"coef": 0.1}))
