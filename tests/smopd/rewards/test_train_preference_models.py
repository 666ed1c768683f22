"""examples/train_preference_models.py: which pairs it trains on, and two steps of a tiny model."""

import json

import pytest
from transformers import Qwen2ForCausalLM

from smopd.rewards.preference_model import preference_reward
from tests.smopd.rewards.tiny_preference import byte_tokenizer, config


def pair(i):
    return {
        "prompt": [{"role": "user", "content": f"Question {i}?"}],
        "response_0": "yes " * (i % 3 + 1),
        "response_1": "no " * (i % 4 + 1),
        "better_response_id": i % 2,
        "safer_response_id": 1,
    }


@pytest.mark.slow
def test_two_steps_of_a_tiny_base(tmp_path, capsys):
    pytest.importorskip("trl", reason="trl is not installed")
    from examples import train_preference_models as example

    Qwen2ForCausalLM(config(byte_tokenizer())).save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    data, seen, output = tmp_path / "pairs.jsonl", tmp_path / "seen.jsonl", tmp_path / "out"
    data.write_text("".join(json.dumps(pair(i)) + "\n" for i in range(12)))
    seen.write_text(json.dumps(pair(3)) + "\n")
    arguments = ["--data", str(data), "--evaluation", str(seen), "--output", str(output)]
    arguments += ["--steps", "2", "--batch-size", "2", "--held-out", "3", "--learning-rate", "1e-3"]

    example.main([*arguments, "--base", str(tmp_path / "base"), "--max-tokens", "256"])
    shown = capsys.readouterr().out
    assert "12 pairs, 1 left out" in shown and "helpful: trained on 8 pairs" in shown
    assert "harmless: prefers the better response of" in shown and "of 3 held-out pairs" in shown
    scores = [
        preference_reward(["Hi"] * 2, ["yes", "no"], model=str(output / name), max_tokens=256)
        for name in ("helpful", "harmless")
    ]
    assert scores[0] != scores[1] and all(score is not None for pair in scores for score in pair)
