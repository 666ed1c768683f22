"""Sampling at a URL: a real `vllm serve`, reached directly and through a relay that fails on purpose."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
import torch

pytest.importorskip("vllm")

from smopd.engine.remote_rollout import RemoteRollout
from smopd.engine.servers import NoServer, Patience, Refused, Servers
from smopd.engine.types import Sampling
from smopd.small_models import world_model
from tests.engine.tiny import assert_sampled_by

PROMPTS = [(5, 9, 11), (7,), (20, 21, 22, 23, 24, 25), (30, 31), (40,)]
GROUPS = [3, 8, 9, 11, 40]
GREEDY = Sampling(temperature=0.0, max_new_tokens=8)
QUICK = Patience(deadline_seconds=120.0, retries=3, backoff_seconds=0.01, concurrency=2)
ENDS = [1]
STARTED_WITHIN = 900.0  # seconds


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The URL of a server as engine/remote_rollout.py says to start it."""
    folder = tmp_path_factory.mktemp("served")
    model, tokenizer = world_model(0)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "model")]
    command += ["--port", str(port), "--host", "127.0.0.1", "--max-model-len", "64", "--dtype", "float32"]
    command += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    command += ["--worker-extension-cls", "smopd.engine.vllm_transfer.Extension"]
    command += ["--weight-transfer-config", '{"backend": "smopd_files"}', "--enforce-eager"]
    command += ["--no-enable-chunked-prefill"]  # needed on a CPU
    environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    log = (folder / "log").open("wb")
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + STARTED_WITHIN
        while not answers(url):
            assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()[
                -4000:
            ]
            time.sleep(1.0)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5.0).is_success
    except httpx.TransportError:
        return False


class Relay:
    """Another server's front: hands requests on until told otherwise.

    Args:
        dies_after: completions that it answers before it is gone, as a killed server is.
        busy: of the first completions, how many it answers by status 503.
    """

    def __init__(self, to: str, *, dies_after: int | None = None, busy: int = 0):
        self.to, self.left, self.busy, self.served = to, dies_after, busy, 0
        self.lock = threading.Lock()
        self.stopping: threading.Thread | None = None
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        """Begins to answer, again where it was stopped."""
        relay = self
        if relay.stopping is not None:
            relay.stopping.join()
            relay.stopping = None

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                relay.answer(self, httpx.get(relay.to + self.path, timeout=120.0))

            def do_POST(self):
                content = self.rfile.read(int(self.headers["Content-Length"] or 0))
                completion = self.path == "/v1/completions"
                with relay.lock:
                    if completion and relay.left == 0:
                        self.connection.shutdown(socket.SHUT_RDWR)
                        if relay.stopping is None:
                            relay.stopping = threading.Thread(target=relay.stop)
                            relay.stopping.start()
                        return
                    if completion and relay.busy > 0:
                        relay.busy -= 1
                        relay.answer(self, httpx.Response(503, text="busy"))
                        return
                    if completion and relay.left is not None:
                        relay.left -= 1
                    relay.served += completion
                headers = {"Content-Type": "application/json"}
                relay.answer(
                    self, httpx.post(relay.to + self.path, content=content, headers=headers, timeout=120.0)
                )

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @staticmethod
    def answer(handler: BaseHTTPRequestHandler, answer: httpx.Response) -> None:
        handler.send_response(answer.status_code)
        handler.send_header("Content-Length", str(len(answer.content)))
        handler.end_headers()
        handler.wfile.write(answer.content)

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def remote(*urls: str, longest: int = 32) -> RemoteRollout:
    return RemoteRollout(Servers(urls, QUICK), ENDS, longest)


def test_samples_with_the_weights_that_it_was_sent(server):
    rollouts = remote(server)
    for version, seed in enumerate((4, 5), start=1):
        model, _ = world_model(seed)
        rollouts.load_weights(model.state_dict().items(), version)
        made = rollouts.generate(PROMPTS, GROUPS, GREEDY)
        assert [rollout.group for rollout in made] == GROUPS
        assert {rollout.policy_version for rollout in made} == {version}
        assert_sampled_by(model, made)
    warm = rollouts.generate(PROMPTS, GROUPS, Sampling(n=2, temperature=0.7, max_new_tokens=8, seed=3))
    assert len(warm) == 2 * len(PROMPTS)
    assert_sampled_by(model, warm, temperature=0.7, greedy=False)


def test_what_a_killed_server_was_asked_goes_to_the_others(server, caplog):
    dying = Relay(server, dies_after=3)
    rollouts = remote(server, dying.url)
    sampling = Sampling(n=4, max_new_tokens=8, seed=5)
    made = rollouts.generate(PROMPTS, GROUPS, sampling)
    assert dying.served == 3
    assert list(rollouts.servers.out) == [dying.url]
    assert f"{dying.url} is taken out" in caplog.text
    alone = remote(server).generate(PROMPTS, GROUPS, sampling)
    assert [m.response_ids.tolist() for m in made] == [m.response_ids.tolist() for m in alone]


def test_a_server_that_comes_back_gets_the_weights_first(server):
    dying = Relay(server, dies_after=0)
    rollouts = remote(dying.url)
    with pytest.raises(NoServer):
        rollouts.generate(PROMPTS, GROUPS, GREEDY)
    assert list(rollouts.servers.out) == [dying.url]
    dying.left = None
    dying.start()
    model, _ = world_model(6)
    rollouts.load_weights(model.state_dict().items(), 1)
    assert rollouts.servers.out == {}
    assert_sampled_by(model, rollouts.generate(PROMPTS, GROUPS, GREEDY))
    dying.stop()


def test_a_busy_server_is_asked_again(server):
    busy = Relay(server, busy=3)
    rollouts = remote(busy.url)
    assert len(rollouts.generate(PROMPTS, GROUPS, GREEDY)) == len(PROMPTS)
    assert (busy.busy, rollouts.servers.out) == (0, {})
    busy.busy = 1000
    with pytest.raises(NoServer, match="status 503"):
        rollouts.generate(PROMPTS, GROUPS, GREEDY)
    busy.stop()


def test_a_server_without_room_is_refused(server):
    with pytest.raises(ValueError, match="room for 64 tokens, expected 65"):
        remote(server, longest=65)


def test_a_weight_of_another_shape_is_refused_and_nothing_is_served_for_it(server):
    rollouts = remote(server)
    model, _ = world_model(7)
    weights = dict(model.state_dict())
    name = "model.norm.weight"
    with pytest.raises((NoServer, Refused)):
        rollouts.load_weights((weights | {name: torch.zeros(3)}).items(), 1)
    rollouts.load_weights(weights.items(), 2)
    assert_sampled_by(model, rollouts.generate(PROMPTS, GROUPS, GREEDY))
