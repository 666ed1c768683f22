"""Responses of a rollout server that are not what was asked for: the server is out, another one is asked."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from smopd.engine.errors import NoServer
from smopd.engine.remote.rollout import RemoteRollout
from smopd.engine.remote.servers import RetryPolicy, Servers
from smopd.engine.remote.weights import GENERATE
from smopd.engine.types import Sampling

VOCABULARY, END = 50, 1
SAMPLING = Sampling(n=4, max_new_tokens=3)
QUICK = RetryPolicy(deadline_seconds=30.0, retries=1, backoff_seconds=0.01, concurrency=2)


def choice(label, ids=(5, 7, END), logps=(-0.5, -1.0, -0.1), reason="stop"):
    content = [{"logprob": logp} for logp in logps]
    spans = [{"version": label}]
    return {
        "token_ids": ids,
        "logprobs": {"content": content},
        "finish_reason": reason,
        "weight_versions": spans,
    }


class Sampler:
    """A rollout server; `answer(label)` is the body of what it samples."""

    def __init__(self, answer):
        outer = self
        self.label, self.asked = "", 0

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.give({"data": [{"max_model_len": 64}]}, 405 if self.path == GENERATE else 200)

            def do_POST(self):
                self.rfile.read(int(self.headers["content-length"]))
                outer.asked += self.path == GENERATE
                self.give(answer(outer.label) if self.path == GENERATE else {})

            def give(self, body, status=200):
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def sampling():
    made = []

    def make(*answers):
        """A client of one server for each of `answers`."""
        mine = [Sampler(answer) for answer in answers]
        made.extend(mine)
        rollouts = RemoteRollout(Servers([one.url for one in mine], QUICK), [END], 8, VOCABULARY)
        for one in mine:
            one.label = rollouts.weights.label(0)
        return rollouts, mine

    yield make
    for one in made:
        one.server.shutdown()
        one.server.server_close()


def good(label):
    return {"choices": [choice(label)]}


BAD = {
    "an id of the vocabulary's size": lambda label: {"choices": [choice(label, ids=(5, VOCABULARY, END))]},
    "a negative id": lambda label: {"choices": [choice(label, ids=(5, -1, END))]},
    "float ids": lambda label: {"choices": [choice(label, ids=(5.5, 7.5, 1.0))]},
    "ids as text": lambda label: {"choices": [choice(label, ids=("5", "7", "1"))]},
    "more tokens than asked": lambda label: {"choices": [choice(label, (5,) * 9, (-0.1,) * 9, "length")]},
    "a log-probability fewer": lambda label: {"choices": [choice(label, logps=(-0.5, -1.0))]},
    "no log-probability": lambda label: {"choices": [choice(label, logps=(-0.5, None, -0.1))]},
    "a positive one": lambda label: {"choices": [choice(label, logps=(-0.5, 5.0, -0.1))]},
    "NaN": lambda label: {"choices": [choice(label, logps=(-0.5, float("nan"), -0.1))]},
    "-inf": lambda label: {"choices": [choice(label, logps=(-0.5, float("-inf"), -0.1))]},
    "ended by something else": lambda label: {"choices": [choice(label, reason="abort")]},
    "other weights": lambda label: {"choices": [choice("other")]},
    "no choices": lambda label: {"choices": []},
    "nothing": lambda label: {},
    "a list": lambda label: [],
    "no JSON": lambda label: b"<html>busy</html>",
}


@pytest.mark.parametrize("answer", BAD.values(), ids=BAD)
def test_a_bad_response_is_asked_elsewhere_and_never_taken(sampling, answer):
    rollouts, (bad, _) = sampling(answer, good)
    made = rollouts.generate([(5, 9), (7,), (8,)], [0, 1, 2], SAMPLING)
    assert bad.asked and list(rollouts.servers.out) == [bad.url]
    assert [(r.group, r.response_ids.tolist(), r.finished) for r in made] == [
        (group, [5, 7, END], True) for group in range(3) for _ in range(SAMPLING.n)
    ]
    alone, (bad,) = sampling(answer)
    with pytest.raises(NoServer, match=rf"no server is left: {bad.url}: "):
        alone.generate([(5, 9)], [0], SAMPLING)
