"""Preference models behind URLs: requests, and malformed answers."""

import json

import pytest

from smopd.engine.errors import NoServer
from smopd.engine.preference import PROBE, RemotePreferenceModel
from smopd.rewards.preference_model import preference_reward
from tests.smopd.rewards.tiny_preference import byte_tokenizer


class Endpoint:
    """vLLM's /v1/models and /classify for `loopback`; the score of ids is their sum divided by 16.

    script: number of the call to /classify -> an error status, a malformed body, or None.
    """

    def __init__(self, script=lambda count: None):
        self.script, self.bodies, self.offset, self.length = script, [], 0.0, 512

    def __call__(self, path, body):
        if path == "/health":
            return 200, {}
        if path == "/v1/models":
            return 200, {"data": [{"id": "judge", "max_model_len": self.length}]}
        assert path == "/classify"
        asked = json.loads(body)
        probed = asked["input"] == PROBE
        self.bodies += [] if probed else [asked]
        wrong = None if probed else self.script(len(self.bodies))
        if isinstance(wrong, int):
            return wrong, {"error": "as scripted"}
        rows = [{"index": i, "probs": [sum(ids) / 16 + self.offset]} for i, ids in enumerate(asked["input"])]
        return 200, wrong or {"data": rows[::-1]}


def test_a_server_is_sent_our_ids_and_asked_again_when_busy(loopback, tmp_path):
    endpoint, tokenizer = Endpoint(lambda count: 503 if count == 1 else None), byte_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    texts = ["Fine.", "", "Blue, or any other", "Fine."]
    asked = {"model": str(tmp_path), "url": loopback(endpoint).url, "max_tokens": 512}
    values = preference_reward(["How are you?"] * 4, texts, batch_tokens=100, sign=-1, **asked)
    question = {"role": "user", "content": "How are you?"}
    chats = [[question, {"role": "assistant", "content": text}] for text in texts]
    shown = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in shown]
    assert values == [-sum(each) / 16 for each in ids]
    sent = [row for body in endpoint.bodies for row in body.pop("input")]
    assert all(row in ids for row in sent) and len(endpoint.bodies) > 2
    expected = {"model": "judge", "use_activation": False, "add_special_tokens": False}
    assert all(body == expected for body in endpoint.bodies)


def test_a_server_of_another_model_is_removed(loopback):
    first, same, other = (Endpoint() for _ in range(3))
    other.offset, other.length = 0.5, 64
    urls = [loopback(each).url for each in (first, same, other)]
    model = RemotePreferenceModel(urls)
    assert [*model._servers.removed] == urls[2:] and "the first server" in model._servers.removed[urls[2]]
    assert model.max_tokens == 512
    other.offset, same.offset = 0.0, 0.5
    model._servers.remove(urls[1], "gone")
    assert model.score([(1, 2), (3,)], 100) == [3 / 16, 3 / 16]
    assert [*model._servers.removed] == [urls[1]]


@pytest.mark.parametrize("probs", [([0.5, 0.5], [0.5, 0.5]), ([1.0],), ([1.0], [float("nan")])])
def test_a_server_that_misbehaves_is_named(loopback, probs):
    wrong = {"data": [{"index": i, "probs": each} for i, each in enumerate(probs)]}
    server = loopback(Endpoint(lambda count: wrong))
    with pytest.raises(NoServer, match=f"{server.url}: .*got scores .* a finite number for each of 2"):
        RemotePreferenceModel([server.url]).score([(1, 2), (3,)], 100)
