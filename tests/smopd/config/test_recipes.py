"""The built-in recipes resolve, and the paper's recipes have the values of its tables."""

import pytest
import yaml

from smopd.config.cli import describe, parse, read_settings
from smopd.config.recipe import builtin
from smopd.config.settings import Settings
from smopd.data.alpaca import prompt_row
from tests.ranks import python

STEPS = {
    "rlla_qwen2.5_1.5b": ("Qwen/Qwen2.5-1.5B-Instruct", 150),
    "rlla_qwen2.5_3b": ("Qwen/Qwen2.5-3B-Instruct", 100),
    "rlla_qwen2.5_3b_moderate": ("Qwen/Qwen2.5-3B-Instruct", 100),
    "safe_qwen2.5_3b": ("Qwen/Qwen2.5-3B-Instruct", 100),
    "safe_qwen2.5_7b": ("Qwen/Qwen2.5-7B-Instruct", 66),
    "safe_llama3.2_3b": ("meta-llama/Llama-3.2-3B-Instruct", 100),
}
"""Recipes of the paper -> model and steps of Appendix A."""
WITHOUT_A_TABLE = ["quickstart"]
TEACHERS = {"rlla": ["accuracy_teacher", "format_teacher"], "safe": ["useful_teacher", "harmless_teacher"]}
METHODS = {"gdpo", "smopd", "smopd_sequence_gate", "smopd_token_gate"}
OURS = {"guarded_merge": 0.6, "sequential": 0.6, "sequential_total": 1.6}
OURS |= {"gdpo_total": 2.6, "batch_balanced": 2.6, "saw": 2.6}
"""Runs that are not in the paper -> their steps, as a multiple of the paper's."""
ESTIMATORS = {name: name for name in ("grpo", "gd2po", "batch_balanced", "saw")} | {
    "smopd_gd2po_anchor": "gd2po"
}
KAPPA = {"smopd_kappa32": 32, "smopd_kappa64": 64, "opd_only": 32}


def teachers(recipe: str) -> list[str]:
    return TEACHERS[recipe.partition("_")[0]]


@pytest.mark.parametrize("recipe", builtin())
def test_every_recipe_resolves_and_is_listed(recipe: str, capsys, monkeypatch) -> None:
    assert recipe in (*STEPS, *WITHOUT_A_TABLE)
    command = parse([recipe, "--dry-run", "--show-settings"])
    text = describe(command)
    assert command.settings.name == recipe
    assert Settings.model_validate(yaml.safe_load(text)) == command.settings
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        parse(["--list"])
    listed = [line.split() for line in capsys.readouterr().out.splitlines()]
    for name, run in command.settings.runs.items():
        assert f"  {name} " in text and run.label
        if recipe not in WITHOUT_A_TABLE:
            assert run.reproduces and [name, *run.reproduces.split()] in listed[listed.index([recipe]) :]


def test_a_dry_run_and_a_mistake_need_neither_torch_nor_a_network() -> None:
    code = (
        "import socket, sys\n"
        "def refuse(*args, **kwargs): raise OSError('no network in a dry run')\n"
        "socket.socket.connect = refuse\n"
        "from smopd.train import main\n"
        "for recipe in sys.argv[1:]:\n"
        "    assert main([recipe, '--dry-run']) == 0\n"
        "try:\n"
        "    main(['--opd.kapa', '3'])\n"
        "except SystemExit as stop:\n"
        "    print(stop.code, 'torch' in sys.modules, 'transformers' in sys.modules)\n"
    )
    done = python("-c", code, *STEPS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "2 False False"


@pytest.mark.parametrize("recipe", STEPS)
def test_the_recipes_say_what_the_paper_says(recipe: str) -> None:
    """Values of Appendix A with Tables 5 and 6, and those that each method changes."""
    settings = read_settings(recipe)
    model, steps = STEPS[recipe]
    assert settings.model.path == model and set(settings.runs) >= {*METHODS, *teachers(recipe)}
    rlla, moderate = recipe.startswith("rlla"), recipe.endswith("moderate")
    names, steep = (("accuracy", "format"), 0.9) if rlla else (("useful", "harmless"), 0.7)
    steep = 0.7 if moderate else steep
    profiles = {"base": [0.5, 0.5]} | dict(
        zip(teachers(recipe), ([steep, 1 - steep], [1 - steep, steep]), strict=True)
    )
    for name in settings.runs:
        own = settings.resolved(name)
        taught = name.removesuffix("_lora") if name.endswith("_teacher_lora") else name
        adapter = taught != name
        assert own.loop.steps == round(steps * OURS.get(name, 1))
        assert own.weights(name) == pytest.approx(profiles.get(taught, profiles["base"]))
        assert own.student.learning_rate == (1e-5 if adapter else 1e-6)
        assert (own.student.lora is not None) == adapter
        assert (own.processes, own.rollout.max_new_tokens) == (8, 1024)
        assert tuple(reward.name for reward in own.rewards) == names
        if rlla:
            assert own.data.train.source == "rlla/train" and own.rollout.group_size == 8
            assert [reward.range for reward in own.rewards] == [(-3, 3), (0, 1)]
        else:
            assert own.data.train.source == "safe/alpaca_train" and own.rollout.group_size == 4
            assert (own.loop.prompts_per_step, own.loop.updates_per_step) == (512, 4)
            assert own.rollout.temperature == 0.7
        estimator = ESTIMATORS.get(name, "gdpo")
        assert own.advantage.estimator == estimator
        assert own.advantage.whiten == ("tokens" if estimator == "gd2po" else "responses")
        assert own.opd.coef == 1.0 and own.opd.schedule == "constant" and own.opd.kappa == KAPPA.get(name, 16)
        kind = {"smopd_sequence_gate": "sequence", "smopd_token_gate": "token"}.get(name, "uniform")
        assert (own.opd.gate.kind, own.opd.gate.floor) == (kind, 0.2)
        ours = name == "smopd_merged_tail"
        assert (own.opd.target, own.opd.tail) == (("merged", True) if ours else ("pooled", False))
        assert own.opd.sampled == (name == "smopd_reverse_kl")
        assert own.loss.anchor_coef == (0.0 if name == "opd_only" else 1.0)
        assert own.merge.method == ("weights" if name == "guarded_merge" else "published")
        suffix = "_lora" if name == "smopd_lora_teachers" else ""
        models = [f"{each}{suffix}" for each in teachers(recipe)]
        assert [each.model for each in own.teachers.models] == models


def test_alpaca_rows_become_prompts() -> None:
    def content(**row: object) -> str:
        (message,) = prompt_row({"output": "o", "text": "t", **row})["prompt"]
        assert message["role"] == "user"
        return message["content"]

    assert content(instruction="Do it.", input="") == "Do it."
    assert content(instruction="Do it. ", input="this\n") == "Do it.\n\nthis"
    assert prompt_row({"prompt": [1], "output": "o"}) == {"prompt": [1]}
    with pytest.raises(ValueError, match=r"expected prompt, or the strings .* got \['instruction'\]"):
        prompt_row({"instruction": "Do it."})
