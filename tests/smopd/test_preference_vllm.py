"""A preference model behind vLLM's own pooling server scores as it does in this process."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import httpx
import pytest

from smopd.rewards.preference_model import preference_reward
from tests.smopd.tiny_preference import byte_tokenizer, save

pytest.importorskip("vllm")
from tests.engine.test_vllm_remote import STARTED_WITHIN, answers, free_port

PROMPTS = ["How are you?", "x", "Long " * 30]
COMPLETIONS = ["Fine.", "", "yes"]


def test_a_real_server_scores_as_the_local_model(tmp_path):
    folder = tmp_path / "model"
    save(folder, byte_tokenizer())
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--runner", "pooling", "--port", str(port), "--host", "127.0.0.1", "--dtype", "float32"]
    command += ["--max-model-len", "512", "--enforce-eager"]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    url = f"http://127.0.0.1:{port}"
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + STARTED_WITHIN
        while not answers(url):
            said = (tmp_path / "log").read_text()[-4000:]
            assert process.poll() is None and time.monotonic() < deadline, said
            time.sleep(1.0)
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["max_model_len"] == 512
        asked = {"model": str(folder), "max_tokens": 512}
        here = preference_reward(PROMPTS, COMPLETIONS, **asked)
        assert preference_reward(PROMPTS, COMPLETIONS, url=url, **asked) == pytest.approx(here, abs=1e-3)
    finally:
        process.terminate()
        process.wait(60)
