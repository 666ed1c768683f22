"""Real vLLM servers in processes of their own, and a relay in front of one that fails on purpose."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx

from smopd.engine.remote.weights import GENERATE
from tests import warm
from tests.patience import HANG_SECONDS

ROOT = Path(__file__).parents[3]
ROLLOUTS = ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
ROLLOUTS += ["--worker-extension-cls", "smopd.engine.vllm.transfer.Extension"]
ROLLOUTS += ["--weight-transfer-config", '{"backend": "smopd"}']


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Process:
    """A server of this test: `python -m module ... --port` in a process group of its own."""

    def __init__(self, module: str, log: Path, arguments: Sequence[str]):
        port = free_port()
        self.url, self.log = f"http://127.0.0.1:{port}", log
        self.command = [sys.executable, "-m", module, *arguments, "--port", str(port)]
        self.start()

    def start(self) -> None:
        environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "TORCHDYNAMO_DISABLE": "1"}
        environment |= {"PYTHONPATH": str(ROOT), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        with self.log.open("ab") as file:
            self.process = warm.Popen(
                self.command,
                preload=(self.command[2],),
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def await_health(self) -> None:
        deadline = time.monotonic() + HANG_SECONDS
        while not answers(self.url):
            alive = self.process.poll() is None and time.monotonic() < deadline
            assert alive, self.log.read_text()[-4000:]
            time.sleep(0.5)

    def kill(self) -> None:
        """As a machine that is lost: at once, with its children; nothing where it is gone already."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(60)

    def restart(self) -> None:
        self.kill()
        self.start()
        self.await_health()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()


def serve(model: Path, log: Path, *options: str, length: int = 64) -> Process:
    """vLLM's own server of `model`, small and for a CPU."""
    arguments = ["--model", str(model), "--max-model-len", str(length), "--dtype", "float32"]
    arguments += [
        "--host",
        "127.0.0.1",
        "--enforce-eager",
        "--no-enable-chunked-prefill",
        "--kv-cache-memory-bytes",
        str(32 << 20),
    ]
    return Process("vllm.entrypoints.openai.api_server", log, [*arguments, *options])


@contextmanager
def serving(*servers: Process) -> Iterator[None]:
    """Waits until all answer, and ends them."""
    try:
        for server in servers:
            server.await_health()
        yield
    finally:
        for server in servers:
            server.stop()


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
        holds: the label that its answers give the weights until new ones come, as of a server started anew.
        shares: another client's weights are served too: new ones are acknowledged and go no further.
        raw: the log-probability of the only candidate, as of a server that does not normalise them.
        after: completions are answered once this is set.
    """

    def __init__(
        self,
        to: str,
        *,
        dies_after: int | None = None,
        busy: int = 0,
        holds: str = "",
        shares: bool = False,
        raw: float | None = None,
        after: threading.Event | None = None,
    ):
        self.shares, self.raw, self.after = shares, raw, after
        self.to, self.left, self.busy, self.holds, self.served = to, dies_after, busy, holds, 0
        self.lock = threading.Lock()
        self.stopping: threading.Thread | None = None
        self.died = threading.Event()
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
                asked = b'"allowed_token_ids"' in content  # at the end of a sync
                completion = self.path == GENERATE and not asked
                if completion and relay.after is not None:
                    relay.after.wait(HANG_SECONDS)
                with relay.lock:
                    if completion and relay.left == 0:
                        self.connection.shutdown(socket.SHUT_RDWR)
                        relay.died.set()
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
                if relay.shares and self.path != GENERATE:
                    relay.holds = "" if self.path == "/finish_weight_update" else relay.holds
                    relay.answer(self, httpx.Response(200, text="{}"))
                    return
                headers = {"Content-Type": "application/json"}
                answer = httpx.post(relay.to + self.path, content=content, headers=headers, timeout=120.0)
                if asked and relay.raw is not None:
                    body = answer.json()
                    body["choices"][0]["logprobs"]["content"][0]["logprob"] = relay.raw
                    answer = httpx.Response(200, json=body)
                if completion and relay.holds:
                    body = answer.json()
                    for span in body["choices"][0]["weight_versions"]:
                        span["version"] = relay.holds
                    answer = httpx.Response(200, json=body)
                relay.holds = "" if self.path == "/finish_weight_update" else relay.holds
                relay.answer(self, answer)

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
