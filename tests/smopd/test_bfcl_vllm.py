"""Multi-turn BFCL by the package bfcl-eval against a real vLLM server of a tiny model.

SMOPD_BFCL_PYTHON as in test_bfcl_package.py, which also has right answers; here they are noise.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from smopd.evals import bfcl_multi_turn
from smopd.small_models import world_model

pytest.importorskip("vllm")
from tests.engine.served import serve, serving

ITEM, CATEGORY = "multi_turn_base_50", "multi_turn_base"  # one turn
POSITIONS = 8192  # its prompt has about 3,400 of the world's tokens
ANSWER = 8
PYTHON = os.environ.get("SMOPD_BFCL_PYTHON")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.unproven,
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
            ids={CATEGORY: [ITEM]},
        )
    assert (dict(found.accuracies), found.failed) == ({CATEGORY: 0.0}, 0)
    (file,) = (output / "result").rglob("*_result.json")
    (row,) = map(json.loads, file.read_text().splitlines())
    asked, answered = row["input_token_count"], row["output_token_count"]
    assert (row["id"], len(asked), len(answered)) == (ITEM, 1, 1)
    assert min(asked[0]) > 1000 and max(answered[0]) == ANSWER
    assert log.read_text().count('"POST /v1/completions HTTP/1.1" 200') == len(asked[0])
