"""The evaluation with real vLLM: sampling from a tiny model, and such a model served as API-Bank's judge."""

from __future__ import annotations

import json

import pytest

from smopd import evaluate
from smopd.worlds.models import world_model

pytest.importorskip("vllm")
from tests.engine.vllm.served import serve, serving

CALL = {"name": "Find", "parameters": {"city": "Oslo"}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    for part in world_model(seed=0, max_positions=4096):
        part.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(model):
    """The URL of a `vllm serve` of the model."""
    one = serve(model, model / "log", "--served-model-name", "judge", length=4096)
    with serving(one):
        yield one.url


def test_both_engines_give_the_same_greedy_responses(model, tmp_path):
    prompt = [{"role": "user", "content": "hi"}]
    row = {"prompt": prompt, "reward_model": {"ground_truth": "<think> t </think>\n<response> r </response>"}}
    data = tmp_path / "items.jsonl"
    data.write_text(json.dumps(row) + "\n")
    kept = {}
    for engine in ("local", "vllm"):
        output = tmp_path / engine
        arguments = ["--data", str(data), "--output", str(output), "--max-new-tokens", "8"]
        evaluate.main(["rlla", "--model", str(model), "--engine", engine, *arguments])
        kept[engine] = (output / "rlla_items.jsonl").read_text()
    assert kept["local"] == kept["vllm"]


def test_a_served_model_judges(server, tmp_path):
    """A model with random weights judges nothing, but answers every question: other format, asked once."""
    for level in (1, 2, 3):
        row = {"system": "s", "user": "<user> u </user>", "answer": [CALL]}
        (tmp_path / f"level-{level}-api_processed.json").write_text(json.dumps([row]))
    lines = [json.dumps({"response": text}) + "\n" for text in ("no call", "none", "again none")]
    (tmp_path / "given.jsonl").write_text("".join(lines))
    output = tmp_path / "out"
    arguments = ["--responses", str(tmp_path / "given.jsonl"), "--data", str(tmp_path)]
    arguments += ["--output", str(output)]
    arguments += ["--judge.url", f"{server}/v1", "--judge.model", "judge", "--judge.max-tokens", "8"]
    for asked in (1, 0):  # the three questions are the same
        evaluate.main(["api_bank", *arguments])
        result = json.loads((output / "api_bank.json").read_text())
        assert result["judge"]["asked"] == asked
        assert result["judge_other_format"] == 3 and result["judge_failed"] == 0
