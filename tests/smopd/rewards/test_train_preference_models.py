"""examples/train_preference_models.py: which pairs it trains on, and two steps of a tiny model."""

import pytest
from transformers import Qwen2ForCausalLM

from smopd.rewards.preference_model import preference_reward
from tests.smopd.recipes import write_lines
from tests.smopd.rewards.tiny_preference import byte_tokenizer, config


def pair(i):
    responses = {"response_0": "yes " * (i % 3 + 1), "response_1": "no " * (i % 4 + 1)}
    prompt = [{"role": "user", "content": f"Question {i}?"}]
    return {"prompt": prompt, **responses, "better_response_id": i % 2, "safer_response_id": 1}


@pytest.mark.slow
def test_two_steps_of_a_tiny_base(tmp_path, capsys):
    pytest.importorskip("trl", reason="trl is not installed")
    from examples import train_preference_models as example

    Qwen2ForCausalLM(config(byte_tokenizer())).save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    data, output = write_lines(tmp_path / "pairs.jsonl", map(pair, range(12))), tmp_path / "out"
    seen = write_lines(tmp_path / "seen.jsonl", [pair(3)])
    arguments = ["--data", str(data), "--evaluation", str(seen), "--output", str(output)]
    arguments += ["--steps", "2", "--batch-size", "2", "--held-out", "3", "--learning-rate", "1e-3"]

    example.main([*arguments, "--base", str(tmp_path / "base"), "--max-tokens", "256"])
    shown = capsys.readouterr().out
    assert "12 pairs, 1 left out" in shown and "helpful: trained on 8 pairs" in shown
    assert "harmless: prefers the better response of" in shown and "of 3 held-out pairs" in shown
    models = (str(output / name) for name in ("helpful", "harmless"))
    scores = [preference_reward(["Hi"] * 2, ["yes", "no"], model=each, max_tokens=256) for each in models]
    assert scores[0] != scores[1] and all(score is not None for pair in scores for score in pair)
