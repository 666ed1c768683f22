"""`smopd train` end to end in a tiny environment: both stages, three rewards, and invalid inputs."""

import gzip
import json
import math
import signal
from html import unescape

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from smopd.run import base, pipeline
from tests.smopd.recipes import TINY, metric_lines, train_here, write_recipe

REWARDS = """
def brevity(prompts, completions, **columns):
    return [1 / (1 + len(text)) for text in completions]
"""
BAD_ROWS = """
from smopd.worlds.models import world_model

def null(**options):
    return [{"prompt": "call anna", "ground_truth": ""}, {"prompt": None, "ground_truth": ""}]

def no_tokenizer(seed, layers):
    return world_model(seed=seed, layers=layers)[0], None

def no_weights(seed, layers):
    model, tokenizer = world_model(seed=seed, layers=layers)
    return model.to("meta"), tokenizer

def other_tokenizer(seed, layers):
    model, tokenizer = world_model(seed=seed, layers=layers)
    class Twice(type(tokenizer)):
        def __call__(self, text, **options):
            return super().__call__(text + text, **options)
    tokenizer.__class__ = Twice
    return model, tokenizer

def exits(**options):
    raise SystemExit("enough")
"""


@pytest.fixture
def workplace(tmp_path):
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    (tmp_path / "my_rows.py").write_text(BAD_ROWS)
    return tmp_path


def recipe_of_one_run(folder, changes):
    """Write a recipe with a single run of stage train and no warm start."""
    values = {"loop": {"steps": 2}, "runs": {"gdpo": {"stage": "train"}}, **changes}
    return write_recipe(folder, values, drop=("runs", "teachers", "warm_start"))


# The second is the only reward that varies for an untrained model.
WITH_BREVITY = {"rewards": [TINY["rewards"][0], {"name": "mine", "function": "my_rewards:brevity"}]}


@pytest.mark.slow
def test_three_rewards_and_three_teachers(workplace):
    names = ("accuracy", "format", "brevity")
    weights = {name: [0.8 if other == name else 0.1 for other in names] for name in names}
    runs = {f"{name}_teacher": {"stage": "specialize", "reward_weights": weights[name]} for name in names}
    sampled = {"divergence": "reverse_kl_sampled", "gate": {"kind": "sequence"}}
    runs["student"] = {"stage": "merge"}
    runs["sampled"] = {"stage": "merge", "set": {"opd": sampled}}
    for name, whiten in (("gd2po", "tokens"), ("grpo", "none")):
        own = {"advantage": {"estimator": name, "whiten": whiten}, "loop": {"steps": 1}}
        runs[name] = {"stage": "train", "set": own}
    brevity = {"name": "brevity", "function": "my_rewards:brevity", "range": "batch"}
    changes = {
        "loop": {"steps": 2},
        "rewards": [*TINY["rewards"], brevity],
        "opd": {"gate": {"kind": "token"}},
        "teachers": {"models": [{"model": f"{name}_teacher", "reward": name} for name in names]},
    }
    done = train_here(write_recipe(workplace, changes | {"runs": runs}, drop=("runs", "warm_start")))
    assert done.returncode == 0, done.stderr[-4000:]
    folder = workplace / "runs/tiny"
    results = json.loads((folder / "results.json").read_text())
    assert set(results) == {"base", *runs}
    assert all(0 < row["greedy/brevity"] < 1 for row in results.values())
    for run in ("student", "sampled"):
        lines = metric_lines(folder / run)
        assert [line["step"] for line in lines] == [1, 2]
        for line in lines:
            assert all(value is not None and math.isfinite(value) for value in line.values()), line
            assert {f"teacher_{m}/top_kappa_mass" for m in range(3)} <= line.keys()
    assert "report.html" in done.stdout
    page = unescape((folder / "report.html").read_text())
    assert '<dd>gdpo, but gd2po in "gd2po"; grpo in "grpo"</dd>' in page and "brevity_teacher" in page
    for run in results:
        model = AutoModelForCausalLM.from_pretrained(folder / run / "export")
        tokenizer = AutoTokenizer.from_pretrained(folder / run / "export")
        assert model.config.vocab_size >= len(tokenizer) and tokenizer.chat_template


def test_stages_one_at_a_time(tmp_path):
    short = {"loop": {"steps": 1}, "warm_start": {"steps": 2}, "data": {"evaluation": None}}
    recipe, folder = write_recipe(tmp_path, short), tmp_path / "runs/tiny"
    at_once = train_here(recipe, "--stage", "merge")
    assert at_once.returncode == 1
    assert "the base model is not made yet; run --stage warm-start first" in at_once.stderr
    assert train_here(recipe, "--stage", "warm-start").returncode == 0
    early = train_here(recipe, "--stage", "merge")
    assert early.returncode == 1
    assert "runs.student: needs 'accuracy_teacher', which is not finished" in early.stderr
    assert train_here(recipe, "--stage", "specialize").returncode == 0
    assert not (folder / "student").exists()
    assert train_here(recipe, "--stage", "merge").returncode == 0
    weights = [(folder / run / "export/model.safetensors").read_bytes() for run in ("base", "student")]
    assert weights[0] != weights[1]


def test_a_signal_in_an_export_leaves_a_finished_run(tmp_path, monkeypatch):
    short = {"loop": {"steps": 1}, "warm_start": {"steps": 1}, "checkpoint": {"every": 0}}
    recipe = write_recipe(tmp_path, {**short, "data": {"evaluation": None}})
    for module, run in ((base, "base"), (pipeline, "accuracy_teacher")):
        export = module.export

        def signalled(*given, export=export):
            signal.raise_signal(signal.SIGTERM)
            export(*given)

        monkeypatch.setattr(module, "export", signalled)
        done = train_here(recipe, "--only", "accuracy_teacher")
        assert done.returncode == 143 and "stopped by SIGTERM; finished runs are kept" in done.stderr
        assert (tmp_path / "runs/tiny" / run / "done.json").exists(), run
        monkeypatch.undo()


def test_a_reference_policy_and_sampling_one_step_ahead(workplace):
    changes = WITH_BREVITY | {
        "loop": {"steps": 3, "async_level": 1},
        "loss": {"old_logps": "rollout"},
        "kl_ref": {"coef": 0.1},
        "log": {"profile": 3},
        "student": {"learning_rate": 1e-2},
    }
    result = train_here(recipe_of_one_run(workplace, changes), "--output", "run")
    assert result.returncode == 0, result.stderr
    page = (workplace / "run/report.html").read_text()
    assert "<dt>Advantage estimator</dt><dd>batch_balanced</dd>" in page
    assert "on 4 held-out prompts, 1 greedy response and 1 sampled each;" in page
    lines = [line for line in metric_lines(workplace / "run/gdpo") if "loss/pg" in line]
    assert len(lines) == 3
    assert abs(lines[0]["kl_ref"]) < 1e-5, "the policy begins as its own reference"
    assert abs(lines[0]["loss/reverse"]) < 1e-5
    assert lines[0]["rollout_mismatch"] < 1e-4
    assert lines[2]["kl_ref"] != 0, "the policy has left its reference"
    assert lines[2]["loss/reverse"] != 0
    with gzip.open(workplace / "run/gdpo/trace_step_3_rank_0.json.gz") as file:
        assert len(json.load(file)["traceEvents"]) > 1000
    assert lines[2]["rollout_mismatch"] > 10 * lines[0]["rollout_mismatch"], "it is trained on an older one's"


def test_bad_data_is_named(workplace):
    done = train_here(recipe_of_one_run(workplace, {"data": {"train": {"source": "my_rows:null"}}}))
    assert done.returncode == 1
    assert "error: data.train: " in done.stderr and "row 1: column 'prompt' is None" in done.stderr
    assert "Traceback" not in done.stderr
    for made, said in {
        "null": "model.factory: my_rows:null returned [{",
        "no_tokenizer": "model.factory: my_rows:no_tokenizer returned (Qwen",
        "no_weights": "model.factory: my_rows:no_weights returned a model without weights",
        "other_tokenizer": "model.factory: my_rows:other_tokenizer: AutoTokenizer loads its saved Twice as ",
        "exits": "code that the recipe names has called sys.exit: enough",
    }.items():
        recipe = recipe_of_one_run(workplace, {"model": {"factory": f"my_rows:{made}"}})
        done = train_here(recipe, "--output", f"out/{made}")
        assert done.returncode == 1 and f"error: {said}" in done.stderr, done.stderr
        assert not (workplace / f"out/{made}/base/initial").exists(), "the next start calls the factory again"
    done = train_here(write_recipe(workplace), "--teachers.models.0.model", "nowhere", "--output", "third")
    assert "error: teachers.models: model nowhere: cannot be loaded" in done.stderr
    assert not (workplace / "third/base/metrics.jsonl").exists(), "before the warm start"
