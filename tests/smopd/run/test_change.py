"""Run directories with changed settings: more steps, free changes, `--change`; exported checkpoints."""

import json
import re
import shutil
from pathlib import Path

import pytest

from smopd.engine.models.loading import allow_custom_code
from smopd.engine.student.checkpoint import write_manifest
from smopd.export import main as export
from smopd.train import main as command
from tests.smopd.recipes import json_lines, metric_lines, train_here, write_recipe

RUN = "accuracy_teacher"
MORE = {
    "student": {"learning_rate": 1.0e-2},
    "loss": {"entropy_coef": 0.1},  # a gradient if no reward differs
    "checkpoint": {"every": 2, "keep": 9},
    "evaluation": {"every": 2, "samples": 0},
}


def train(folder: Path, *words: str):
    return train_here(folder / "recipe.yaml", "--only", RUN, "--loop.steps", "4", *words)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two run directories: `four` steps and `six` steps."""
    folder = tmp_path_factory.mktemp("trained")
    write_recipe(folder, MORE, drop=("warm_start",))
    for name, steps in (("four", "4"), ("six", "6")):
        done = train(folder, "--output", name, "--loop.steps", steps)
        assert done.returncode == 0, done.stderr
    assert "accuracy on the first prompt: 3 for the text of its column 'ground_truth', -3" in done.stdout
    return folder


@pytest.fixture
def four(trained, tmp_path):
    shutil.copy(trained / "recipe.yaml", tmp_path)
    shutil.copytree(trained / "four", tmp_path / "four")
    return tmp_path


def changes(folder: Path) -> list[tuple]:
    return [tuple(line.values()) for line in json_lines(folder / "four" / RUN / "changes.jsonl")]


def test_more_steps_continue_a_finished_run_bit_for_bit(trained, four):
    done = train(four, "--output", "four", "--loop.steps", "6")
    assert done.returncode == 0, done.stderr
    assert f"{RUN}, from step 4: loop.steps: was 4, now 6\n" in done.stdout
    assert changes(four) == [(4, "loop.steps", 4, 6)]
    assert metric_lines(four / "four" / RUN) == metric_lines(trained / "six" / RUN)
    for file in ("export/model.safetensors", "evaluation.json", "responses.jsonl", "done.json"):
        assert (four / "four" / RUN / file).read_bytes() == (trained / "six" / RUN / file).read_bytes(), file
    assert "accuracy_teacher, from step 4: loop.steps was 4, now 6" in (four / "four/report.html").read_text()


def test_what_changes_no_result_is_free_and_the_rest_needs_a_word(four):
    free = "--student.micro_batch_tokens 64 --checkpoint.keep 1 --evaluation.every 3 --log.token_views 0"
    memory = "--rollout.vllm.engine_kwargs.gpu_memory_utilization 0.5 --student.gradient_checkpointing true"
    assert train(four, "--output", "four", *free.split(), *memory.split()).returncode == 0
    wanted = {"student.learning_rate": "1e-4", "loop.steps": "3", "rollout.vllm.engine_kwargs.seed": "1"}
    for setting, value in wanted.items():
        refused = train(four, "--output", "four", f"--{setting}", value)
        assert refused.returncode == 1 and "holds runs with other settings" in refused.stderr
        assert f"\n  {setting}: was" in refused.stderr and refused.stderr.count(": was") == 1
    fixed = {"student.lora.rank": "4", "model.kwargs.layers": "2", "student.optimizer": "torch.optim:SGD"}
    for setting, value in fixed.items():
        refused = train(four, "--output", "four", f"--{setting}", value, "--change")
        assert f"give another --output:\n  {setting}: was" in refused.stderr, refused.stderr
    assert not (four / "four" / RUN / "changes.jsonl").exists()


def test_a_change_is_recorded_at_its_step_and_schedules_follow_the_steps(four):
    words = "--change --student.learning_rate 1e-4 --student.schedule linear --loop.steps 5"
    log = four / "four" / RUN / "metrics.jsonl"
    log.write_bytes(log.read_bytes().partition(b"\n")[2])  # a line is lost
    done = train(four, "--output", "four", *words.split())
    assert done.returncode == 0, done.stderr
    assert "now 5 (student.schedule linear recomputed for 5 steps)" in done.stdout
    assert "metrics.jsonl lacks 1 of 4 steps" in done.stdout
    assert changes(four) == [
        (4, "loop.steps", 4, 5),
        (4, "student.learning_rate", 0.01, 0.0001),
        (4, "student.schedule", "constant", "linear"),
    ]
    assert train(four, "--output", "four", *words.split()).returncode == 0 and len(changes(four)) == 3


def test_a_run_without_its_last_checkpoint_is_not_continued(four):
    shutil.rmtree(four / "four" / RUN / "checkpoints")
    done = train(four, "--output", "four", "--loop.steps", "5")
    assert done.returncode == 1 and f"runs.{RUN}: has no checkpoint of step 4" in done.stderr
    assert (four / "four" / RUN / "evaluation.json").exists()


def test_damaged_or_lost_files_of_a_run_are_named(trained, four):
    (four / "four/commands.jsonl").write_bytes(b"\xff\n")
    (four / "four" / RUN / "evaluation.json").write_text('{"greedy/sum": 1')
    done = train(four, "--output", "four")
    assert done.returncode == 1 and f"{RUN}/evaluation.json: is damaged" in done.stderr, done.stderr
    (four / "four" / RUN / "done.json").write_text('{"steps": "4"}')
    with pytest.raises(SystemExit):
        train(four, "--output", "four")
    shutil.copy(trained / "four" / RUN / "done.json", four / "four" / RUN)
    shutil.rmtree(four / "four/base/export")
    done = train(four, "--output", "four", "--loop.steps", "5")
    assert done.returncode == 1 and "base/export: no such folder" in done.stderr, done.stderr


def test_a_checkpoint_becomes_a_model_folder(trained, tmp_path, capsys):
    run, weights = trained / "four" / RUN, "model.safetensors"
    lines = [line for line in metric_lines(run) if "greedy/sum" in line]
    best = max(lines, key=lambda line: (line["greedy/sum"], line["step"]))["step"]
    for name, words in (("last", []), ("2", ["--step", "2"]), ("best", ["--best", "greedy/sum"])):
        assert export([str(run), "--output", str(tmp_path / name), *words]) == 0
    assert f"wrote step {best} to {tmp_path / 'best'}" in capsys.readouterr().out
    made = {name: (tmp_path / name / weights).read_bytes() for name in ("last", "2", "best")}
    assert made["last"] == (run / "export" / weights).read_bytes() != made["2"]
    assert made["best"] == made["2" if best == 2 else "last"]
    assert (tmp_path / "2/tokenizer.json").exists() and (tmp_path / "2/config.json").exists()
    cards = {name: (tmp_path / name / "README.md").read_text() for name in ("2", "last")}
    assert "2 of 4 steps" in cards["2"] and "(this model)" not in cards["2"], "the results are of step 4"
    assert "4 of 4 steps" in cards["last"] and "(this model)" in cards["last"]
    for words, said in (
        (["--step", "3"], "--step: got 3, expected a kept checkpoint"),
        (["--best", "greedy/summ"], "'greedy/summ'; did you mean greedy/sum?"),
        (["--best", "greedy/sum", "--step", "2"], "--step: got 2 and --best greedy/sum"),
    ):
        with pytest.raises(SystemExit, match="2"):
            export([str(run), "--output", str(tmp_path / "none"), *words])
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        export([str(run), "--output", str(tmp_path / "2")])


OWN_CODE = """
from transformers import Qwen2Config, Qwen2ForCausalLM
class OwnConfig(Qwen2Config): model_type = "own"
class Own(Qwen2ForCausalLM): config_class = OwnConfig
"""


def test_a_run_of_a_model_with_code_of_its_own_is_exported_if_its_settings_allow_that(four, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(four / "modules"))
    base, settings = four / "four/base/export", four / "four/config.yaml"
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"model_type": "own", "auto_map": own}))
    (base / "own.py").write_text(OWN_CODE)
    write_manifest(base, {})
    settings.write_text(settings.read_text().replace("trust_remote_code: false", "trust_remote_code: true"))
    try:
        assert export([str(four / "four" / RUN), "--output", str(four / "model")]) == 0
    finally:
        allow_custom_code(False)
    assert json.loads((four / "model/config.json").read_text())["model_type"] == "own"


def test_a_link_to_a_run_is_exported(four):
    run = four / "four" / RUN
    run.symlink_to(run.rename(four / RUN))
    assert export([str(run), "--output", str(four / "model")]) == 0


def test_a_dry_run_tries_the_rewards_and_writes_nothing(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(trained)
    before = sorted(trained.rglob("*"))
    assert command(["recipe.yaml", "--output", "new", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("plan of recipe.yaml, in new\n") and "reward format on the first prompt: 1" in out
    (off,) = re.findall("the engine's log-probabilities on the first prompt are (.*) nats from the", out)
    assert float(off) < 1e-4

    (tmp_path / "raising.py").write_text("def reward(completions, **columns): raise KeyError('no')")
    monkeypatch.syspath_prepend(tmp_path)
    raising = ["--rewards.1.function", "raising:reward"]
    assert command(["recipe.yaml", "--output", "new", "--dry-run", *raising]) == 1
    out, err = capsys.readouterr()
    assert "reward accuracy on the first prompt: 3 for" in out and "nats from the trainer's" in out
    assert err.splitlines()[-1] == "error: rewards: format failed on the first prompt, see above"
    assert sorted(trained.rglob("*")) == before
    # Nor does a run start.
    assert command(["recipe.yaml", "--output", str(tmp_path / "new"), *raising]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == err.splitlines()[-1]
    assert not list(tmp_path.glob("new/*/metrics.jsonl"))
