"""The evaluation with real vLLM samples what the local engine samples."""

from __future__ import annotations

import json

import pytest

from smopd import evaluate
from smopd.worlds.models import world_model
from tests.engine.vllm.served import fork_engines

pytest.importorskip("vllm")


def test_both_engines_give_the_same_greedy_responses(tmp_path):
    for part in world_model(seed=0, max_positions=4096):
        part.save_pretrained(tmp_path / "model")
    prompt = [{"role": "user", "content": "hi"}]
    row = {"prompt": prompt, "reward_model": {"ground_truth": "<think> t </think>\n<response> r </response>"}}
    data = tmp_path / "items.jsonl"
    data.write_text(json.dumps(row) + "\n")
    kept = {}
    fork_engines()
    for engine in ("local", "vllm"):
        arguments = ["--data", str(data), "--output", str(tmp_path / engine), "--max-new-tokens", "8"]
        evaluate.main(["rlla", "--model", str(tmp_path / "model"), "--engine", engine, *arguments])
        kept[engine] = (tmp_path / engine / "rlla_items.jsonl").read_text()
    assert kept["local"] == kept["vllm"]
