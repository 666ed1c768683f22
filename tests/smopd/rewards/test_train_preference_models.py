"""examples/train_preference_models.py: which pairs it trains on, mistakes, and two steps of a tiny model."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest


@pytest.fixture(scope="module")
def example(repository_root):
    path = repository_root / "examples" / "train_preference_models.py"
    spec = importlib.util.spec_from_file_location("train_preference_models", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def write_pairs(path, n=12, **changes):
    rows = [
        {
            "prompt": [{"role": "user", "content": f"Question {i}?"}],
            "response_0": "yes " * (i % 3 + 1),
            "response_1": "no " * (i % 4 + 1),
            "better_response_id": i % 2,
            "safer_response_id": 1,
            **changes,
        }
        for i in range(n)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.slow
def test_two_steps_of_a_tiny_base(example, tmp_path, capsys):
    pytest.importorskip("trl", reason="trl is not installed")
    from transformers import Qwen2ForCausalLM

    from smopd.rewards.preference_model import preference_reward
    from tests.smopd.rewards.tiny_preference import END, byte_tokenizer, config

    def base(name, **settings):
        tokenizer = byte_tokenizer(**settings)
        Qwen2ForCausalLM(config(tokenizer)).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    data = write_pairs(tmp_path / "pairs.jsonl")
    (tmp_path / "seen.jsonl").write_text(
        json.dumps({"prompt": [{"role": "user", "content": "Question 3?"}]}) + "\n"
    )
    output = tmp_path / "out"
    arguments = ["--data", data, "--evaluation", str(tmp_path / "seen.jsonl"), "--output", str(output)]
    arguments += ["--steps", "2", "--batch-size", "2", "--held-out", "3", "--learning-rate", "1e-3"]

    def mistake(*more):
        with pytest.raises(SystemExit) as ended:
            example.main([*arguments, *more])
        assert ended.value.code == 2
        return capsys.readouterr().err

    assert "--max-tokens is 2048, expected 1 to the base's 512" in mistake("--base", base("base"))
    assert "--held-out is 11" in mistake("--base", "b", "--held-out", "11")
    padded_by_end = mistake("--base", base("end", pad=END), "--max-tokens", "256")
    assert f"its pad token is {END}, expected another than the end token" in padded_by_end

    example.main([*arguments, "--base", str(tmp_path / "base"), "--max-tokens", "256"])
    shown = capsys.readouterr().out
    assert "12 pairs, 1 left out" in shown and "helpful: trained on 8 pairs" in shown
    assert "harmless: prefers the better response of" in shown and "of 3 held-out pairs" in shown
    scores = [
        preference_reward(["Hi"] * 2, ["yes", "no"], model=str(output / name), max_tokens=256)
        for name in ("helpful", "harmless")
    ]
    assert scores[0] != scores[1] and all(score is not None for pair in scores for score in pair)
