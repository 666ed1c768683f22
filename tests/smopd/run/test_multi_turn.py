"""A run with an environment: held-out prompts, teachers and token view, and a resume bit for bit."""

import json
from pathlib import Path

from smopd.worlds.models import world_model
from tests.smopd.recipes import json_lines, metric_lines, train_here, write_recipe

MODULE = """
from pathlib import Path


class Numbers:
    def begin(self, row):
        return []

    def answer(self, state, message):
        state.append(message["content"])
        if len(state) == 3:
            return None
        return [{"role": "user", "content": str(len(message["content"]) % 40)}]


def turns(completions, training_step=None, **columns):
    if training_step and training_step[0] == 2 and Path("broken").exists():
        raise RuntimeError("the judge is gone")
    return [len(messages) + len(messages[-1]["content"]) / 100 for messages in completions]


def length(prompts, completions, **columns):
    return [float(len(text)) for text in completions]
"""


def save_model(folder: Path, seed: int) -> str:
    """Save a random model; one token in eight ends a response."""
    model, tokenizer = world_model(seed)
    model.generation_config.eos_token_id = list(range(3, len(tokenizer), 8))
    for part in (model, tokenizer):
        part.save_pretrained(folder)
    return str(folder)


def recipe_in(folder: Path, models: list[str]) -> Path:
    folder.mkdir()
    (folder / "spoken.py").write_text(MODULE)
    base, *teachers = models
    changes = {
        "model": {"factory": None, "path": base},
        "rewards": [
            {"name": "turns", "function": "spoken:turns", "range": [0, 6]},
            {"name": "length", "function": "spoken:length", "range": [0, 300]},
        ],
        "rollout": {"environment": "spoken:Numbers", "turns": 4, "max_new_tokens": 12},
        "scoring": {"max_unscorable_share": 0.0},
        "loop": {"steps": 3, "async_level": 1},
        "loss": {"importance_cap": 2.0},
        "teachers": {
            "models": [{"model": m, "reward": r} for m, r in zip(teachers, ("turns", "length"), strict=True)]
        },
        "checkpoint": {"every": 100},
        "runs": {"student": {"stage": "merge"}},
    }
    return write_recipe(folder, changes, drop=("warm_start", "runs"))


def test_a_run_with_an_environment_resumes_bit_for_bit(tmp_path: Path, caplog) -> None:
    models = [save_model(tmp_path / f"model{seed}", seed) for seed in range(3)]
    straight = recipe_in(tmp_path / "straight", models)
    done = train_here(straight)
    assert done.returncode == 0, done.stderr[-4000:]
    assert ", 1 for an empty answer" in done.stdout + done.stderr, "preflight scores a conversation"
    run = tmp_path / "straight/runs/tiny/student"
    lines = metric_lines(run)
    for line in lines:
        assert 1 < line["conversation/turns"] <= 3 and line["conversation/environment_tokens"] > 0
        assert 0 < line["conversation/ended/environment"] < 1
        assert line["response/tokens"] <= 3 * 12 and line["rollout_mismatch"] < 1.0
    assert lines[0]["rollout_mismatch"] < 1e-4
    evaluation = json.loads((run / "evaluation.json").read_text())
    assert evaluation["sampled/turns"] > 1.2, "held-out prompts are conversations too"
    views = json_lines(run / "tokens.jsonl")
    sampled = ["log_ratios" in token for view in views for token in view["tokens"]]
    assert any(sampled) and not all(sampled), "only the policy's tokens have teachers"

    resumed = recipe_in(tmp_path / "resumed", models)
    (tmp_path / "resumed/broken").touch()
    ended = train_here(resumed)
    assert ended.returncode == 1 and "step 2 is done and saved; rerun to resume" in caplog.text
    assert ended.stderr.startswith("error: reward 'turns'") and "the judge is gone" in ended.stderr
    (tmp_path / "resumed/broken").unlink()
    done = train_here(resumed)
    assert done.returncode == 0, done.stderr[-4000:]
    other = tmp_path / "resumed/runs/tiny/student"
    assert metric_lines(other) == lines
    for file in ("export/model.safetensors", "evaluation.json", "responses.jsonl", "samples.jsonl"):
        assert (other / file).read_bytes() == (run / file).read_bytes(), file
