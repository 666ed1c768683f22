"""A preference model behind vLLM's own pooling server scores as it does in this process."""

from __future__ import annotations

import httpx
import pytest

from smopd.rewards.preference_model import preference_reward
from tests.smopd.rewards.tiny_preference import byte_tokenizer, save

pytest.importorskip("vllm")
from tests.engine.vllm.served import serve, serving

PROMPTS = ["How are you?", "x", "Long " * 30]
COMPLETIONS = ["Fine.", "", "yes"]


def test_a_real_server_scores_as_the_local_model(tmp_path):
    folder = tmp_path / "model"
    save(folder, byte_tokenizer())
    server = serve(folder, tmp_path / "log", "--runner", "pooling", length=512)
    with serving(server):
        url = server.url
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["max_model_len"] == 512
        asked = {"model": str(folder), "max_tokens": 512}
        here = preference_reward(PROMPTS, COMPLETIONS, **asked)
        assert preference_reward(PROMPTS, COMPLETIONS, url=url, **asked) == pytest.approx(here, abs=1e-3)
