"""Multi-turn BFCL by the package bfcl-eval against a real vLLM server of a tiny model.

SMOPD_BFCL_PYTHON as in test_bfcl_package.py, which also has right answers; here they are noise.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from smopd.evals.bfcl import multi_turn as bfcl_multi_turn
from smopd.worlds.models import world_model

pytest.importorskip("vllm")
from tests.engine.vllm.served import serve, serving

CATEGORY = "multi_turn_base"
ITEMS = [f"{CATEGORY}_50", f"{CATEGORY}_51"]  # the package takes the deviation of their latencies
POSITIONS = 16_384  # a prompt has about 4,700 of the world's tokens a turn
ANSWER = 8
PYTHON = os.environ.get("SMOPD_BFCL_PYTHON")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="SMOPD_BFCL_PYTHON names no Python with bfcl-eval"),
]


def test_a_served_model_is_asked_and_scored(tmp_path: Path) -> None:
    model, log, output = tmp_path / "model", tmp_path / "log", tmp_path / "out"
    for part in world_model(0, max_positions=POSITIONS):
        part.save_pretrained(model)
    limit = ["--override-generation-config", json.dumps({"max_new_tokens": ANSWER})]
    server = serve(model, log, *limit, length=POSITIONS)
    with serving(server):
        found = bfcl_multi_turn.run_multi_turn(
            f"{server.url}/v1",
            model,
            output,
            categories=[CATEGORY],
            python=str(PYTHON),
            threads=1,
            ids={CATEGORY: ITEMS},
        )
    assert (dict(found.accuracies), found.failed) == ({CATEGORY: 0.0}, 0)
    (file,) = (output / "result").rglob("*_result.json")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert {row["id"] for row in rows} == set(ITEMS)
    asked = [n for row in rows for turn in row["input_token_count"] for n in turn]
    answered = [n for row in rows for turn in row["output_token_count"] for n in turn]
    assert min(asked) > 1000 and max(answered) == ANSWER
    assert log.read_text().count('"POST /v1/completions HTTP/1.1" 200') == len(asked) == len(answered)
