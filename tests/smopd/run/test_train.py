"""The command end to end on a tiny world.

Both stages, any number of rewards and teachers, and its bad days.
"""

from __future__ import annotations

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.patience import MISSED_SECONDS
from tests.smopd.recipes import metric_lines, train_here, write_recipe

REWARDS = """
import time

def brevity(prompts, completions, **columns):
    return [1 / (1 + len(text)) for text in completions]

async def raises(prompts, completions, **columns):
    raise KeyError("no such thing")

def hangs(prompts, completions, **columns):
    time.sleep(600)
"""
BAD_ROWS = """
def empty(**options):
    return []

def null(**options):
    return [{"prompt": "call anna", "ground_truth": ""}, {"prompt": None, "ground_truth": ""}]
"""


@pytest.fixture
def workplace(tmp_path):
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    (tmp_path / "my_rows.py").write_text(BAD_ROWS)
    return tmp_path


def recipe_of_one_run(folder, changes):
    """A single control run; the warm start is left out, so that it begins at once."""
    values = {"loop": {"steps": 2}, **changes}
    path = write_recipe(folder, values, drop=("runs", "teachers", "warm_start"))
    path.write_text(path.read_text() + "runs: {gdpo: {stage: train}}\n")
    return path


def with_reward(function, **more):
    plain = {"name": "accuracy", "function": "smopd.rewards.rlla:accuracy_reward"}
    return {"rewards": [plain, {"name": "mine", "function": f"my_rewards:{function}"}], **more}


@pytest.mark.slow
def test_three_rewards_and_three_teachers(workplace):
    recipe = write_recipe(
        workplace,
        {
            "loop": {"steps": 2},
            "rewards": [
                {"name": "accuracy", "function": "smopd.rewards.rlla:accuracy_reward", "range": [-3, 3]},
                {"name": "format", "function": "smopd.rewards.rlla:format_reward", "range": [0, 1]},
                {"name": "brevity", "function": "my_rewards:brevity", "range": "batch"},
            ],
            "opd": {"gate": {"kind": "token"}},
            "teachers": {
                "models": [
                    {"model": "accuracy_teacher", "reward": "accuracy"},
                    {"model": "format_teacher", "reward": "format"},
                    {"model": "brevity_teacher", "reward": "brevity"},
                ]
            },
        },
        drop=("runs",),
    )
    recipe.write_text(
        recipe.read_text()
        + "runs:\n"
        + "".join(
            f"  {name}_teacher: {{stage: specialize, reward_weights: {weights}}}\n"
            for name, weights in {
                "accuracy": [0.8, 0.1, 0.1],
                "format": [0.1, 0.8, 0.1],
                "brevity": [0.1, 0.1, 0.8],
            }.items()
        )
        + "  student: {stage: merge}\n"
        + "  sampled: {stage: merge, set: {opd: {divergence: reverse_kl_sampled, gate: {kind: sequence}}}}\n"
        + "  gd2po: {stage: train, set: {advantage: {estimator: gd2po, whiten: tokens}}}\n"
        + "  grpo: {stage: train, set: {advantage: {estimator: grpo}}}\n"
    )
    done = train_here(recipe)
    assert done.returncode == 0, done.stderr[-4000:]
    folder = workplace / "runs/tiny"
    results = json.loads((folder / "results.json").read_text())
    assert set(results) == {
        "base", "accuracy_teacher", "format_teacher", "brevity_teacher", "student", "sampled", "gd2po", "grpo"
    }  # fmt: skip
    assert all(0 < row["greedy/brevity"] < 1 for row in results.values())
    for run in ("student", "sampled"):
        lines = metric_lines(folder / run)
        assert [line["step"] for line in lines] == [1, 2]
        for line in lines:
            assert all(value is not None and math.isfinite(value) for value in line.values()), line
            assert {f"teacher_{m}/top_kappa_mass" for m in range(3)} <= line.keys()
    assert "report.html" in done.stdout
    page = (folder / "report.html").read_text()
    assert "brevity_teacher" in page
    for run in results:
        model = AutoModelForCausalLM.from_pretrained(folder / run / "export")
        tokenizer = AutoTokenizer.from_pretrained(folder / run / "export")
        assert model.config.vocab_size >= len(tokenizer) and tokenizer.chat_template


@pytest.mark.slow
def test_stages_one_at_a_time_and_teachers_by_path(tmp_path):
    recipe = write_recipe(tmp_path, {"loop": {"steps": 2}})
    at_once = train_here(recipe, "--stage", "merge")
    assert at_once.returncode == 1
    assert "the base model is not made yet; run --stage warm-start first" in at_once.stderr
    assert train_here(recipe, "--stage", "warm-start").returncode == 0
    early = train_here(recipe, "--stage", "merge")
    assert early.returncode == 1
    assert "runs.student: needs the run 'accuracy_teacher', which is not finished" in early.stderr
    done = train_here(recipe, "--stage", "specialize")
    assert done.returncode == 0, done.stderr[-4000:]
    folder = tmp_path / "runs/tiny"
    assert not (folder / "student").exists()
    teachers = [
        {"model": str(folder / f"{name}_teacher/export"), "reward": name} for name in ("accuracy", "format")
    ]
    by_path = write_recipe(
        tmp_path,
        {
            "name": "by_path",
            "loop": {"steps": 2},
            "model": {"path": str(folder / "base/export"), "factory": None},
            "teachers": {"models": teachers},
        },
        drop=("warm_start", "runs"),
    )  # fmt: skip
    by_path.write_text(by_path.read_text() + "runs: {student: {stage: merge}}\n")
    done = train_here(by_path)
    assert done.returncode == 0, done.stderr[-4000:]
    assert (tmp_path / "runs/by_path/student/export/model.safetensors").exists()
    weights = [
        AutoModelForCausalLM.from_pretrained(path).lm_head.weight
        for path in (folder / "base/export", tmp_path / "runs/by_path/student/export")
    ]
    assert not torch.equal(*weights)


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_a_reference_policy_and_sampling_one_step_ahead(workplace, place):
    changes = with_reward(
        "brevity",  # of an untrained model's answers it alone varies
        loop={"steps": 3, "async_level": 1},
        loss={"old_logps": "rollout"},
        kl_ref={"coef": 0.1, "place": place},
        advantage={"estimator": "grpo" if place == "reward" else "gdpo"},
        student={"learning_rate": 1e-2},
    )
    result = train_here(recipe_of_one_run(workplace, changes), "--output", "run")
    assert result.returncode == 0, result.stderr
    lines = [line for line in metric_lines(workplace / "run/gdpo") if "loss/pg" in line]
    assert len(lines) == 3
    assert abs(lines[0]["kl_ref"]) < 1e-5, "the policy begins as its own reference"
    assert (abs(lines[0]["loss/reverse"]) < 1e-5) or place == "reward"
    assert lines[0]["rollout_mismatch"] < 1e-4
    assert lines[2]["kl_ref"] != 0, "the policy has left its reference"
    assert lines[2]["loss/reverse"] != 0 or place == "reward"
    assert lines[2]["rollout_mismatch"] > 10 * lines[0]["rollout_mismatch"], "it is trained on an older one's"


def test_a_reward_that_raises_stops_the_run_and_is_named(workplace):
    done = train_here(
        recipe_of_one_run(workplace, with_reward("raises", scoring={"max_unscorable_share": 0.0}))
    )
    assert done.returncode == 1
    assert "reward 'mine' left 16 of 32 responses without a score" in done.stderr
    assert "no such thing" in done.stderr


@pytest.mark.slow
def test_a_reward_that_hangs_is_killed_and_counted(workplace):
    scoring = {"deadline_seconds": MISSED_SECONDS, "max_unscorable_share": 1.0}
    done = train_here(recipe_of_one_run(workplace, with_reward("hangs", scoring=scoring, loop={"steps": 1})))
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = metric_lines(workplace / "runs/tiny/gdpo")
    assert line["reward/mine/unscorable"] == 1.0
    assert line["reward/accuracy/unscorable"] == 0.0
    assert math.isfinite(line["grad_norm"])


@pytest.mark.parametrize(
    ("source", "message"),
    [("my_rows:empty", "the data set is empty"), ("my_rows:null", "row 1: column 'prompt' is None")],
)
def test_bad_data_is_named(workplace, source, message):
    done = train_here(recipe_of_one_run(workplace, {"data": {"train": {"source": source}}}))
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_other_rows_and_other_rewards_than_before_are_named(workplace, caplog):
    rows = "def some(**options):\n    return [{'prompt': 'call anna', 'ground_truth': ''}] * 4\n"
    (workplace / "changing.py").write_text(rows)
    data = {"data": {"train": {"source": "changing:some", "kwargs": {}}, "evaluation": None}}
    recipe, folder = recipe_of_one_run(workplace, {**data, **with_reward("brevity")}), workplace / "runs/tiny"
    assert train_here(recipe).returncode == 0
    first = (folder / "environment.json").read_bytes()
    assert train_here(recipe).returncode == 0
    assert "is not what it was" not in caplog.text
    (workplace / "changing.py").write_text(rows.replace("anna", "bert"))
    (workplace / "my_rewards.py").write_text(REWARDS + "# changed\n")
    assert train_here(recipe).returncode == 0
    told = [record.getMessage() for record in caplog.records if "is not what it was" in record.getMessage()]
    assert [line.split(": ")[1].split(" is not")[0] for line in told] == ["data.train", "rewards.mine"]
    commands = [json.loads(line) for line in (folder / "commands.jsonl").read_text().splitlines()]
    assert len(commands) == 3 and (folder / "environment.json").read_bytes() == first
    assert commands[0]["inputs"] == commands[1]["inputs"] != commands[2]["inputs"]
