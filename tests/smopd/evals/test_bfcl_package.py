"""Multi-turn BFCL by the package bfcl-eval itself, against a loopback endpoint that replays an item's answer.

`pip install bfcl-eval soundfile` pins many packages: give the Python of an environment of its own in
SMOPD_BFCL_PYTHON.
"""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from smopd.evals.bfcl import multi_turn as bfcl_multi_turn
from smopd.worlds.models import world_model

ITEM, CATEGORY = "multi_turn_base_0", "multi_turn_base"
PYTHON = os.environ.get("SMOPD_BFCL_PYTHON")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="SMOPD_BFCL_PYTHON names no Python with bfcl-eval"),
]


def answer() -> list[list[str]]:
    """The item's calls, by turn, from the package's own data."""
    where = "import bfcl_eval; print(bfcl_eval.__path__[0])"
    package = subprocess.run([str(PYTHON), "-c", where], check=True, capture_output=True, text=True).stdout
    file = Path(package.strip()) / "data/possible_answer/BFCL_v4_multi_turn_base.json"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    turns = next(row["ground_truth"] for row in rows if row["id"] == ITEM)
    positional = "sort('"  # the package's decoder of responses takes keyword arguments alone
    return [[call.replace(positional, "sort(file_name='") for call in calls] for calls in turns]


@contextmanager
def replaying(model: Path, said: list[str]) -> Iterator[tuple[str, list[str]]]:
    """A server of the Completions API whose answers are `said`, in order; yields its URL and the prompts."""
    prompts: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send({"object": "list", "data": [{"id": str(model), "object": "model"}]})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/v1/completions" and asked["model"] == str(model)
            prompts.append(asked["prompt"])
            text = said[len(prompts) - 1]
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            choice = {"index": 0, "text": text, "finish_reason": "stop", "logprobs": None}
            self._send(
                {
                    "id": "c",
                    "object": "text_completion",
                    "created": 0,
                    "model": str(model),
                    "choices": [choice],
                    "usage": usage,
                }
            )

        def _send(self, body: object) -> None:
            data = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1", prompts
        server.shutdown()


@pytest.mark.parametrize("right", [True, False])
def test_an_item_is_asked_executed_and_scored(right: bool, tmp_path: Path) -> None:
    model = tmp_path / "export"
    for part in world_model(0):
        part.save_pretrained(model)
    said = [text for calls in answer() for text in (f"[{', '.join(calls)}]", "That is done.")]
    if not right:
        said[0] = "[ls()]"
    with replaying(model, said) as (url, prompts):
        found = bfcl_multi_turn.run_multi_turn(
            url,
            model,
            tmp_path / "out",
            categories=[CATEGORY],
            python=str(PYTHON),
            threads=1,
            ids={CATEGORY: [ITEM]},
        )
    assert (dict(found.accuracies), found.failed) == ({CATEGORY: float(right)}, 0)
    assert len(prompts) == len(said), "each turn is its calls, their execution, and a last word"
    assert "<|im_start|>" in prompts[0]
