"""Servers of vLLM and of our teachers in processes of their own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.patience import HANG_SECONDS

ROOT = Path(__file__).parents[3]
ROLLOUTS = """--enable-scale-out --logprobs-mode processed_logprobs --generation-config vllm
    --worker-extension-cls smopd.engine.vllm.transfer.Extension
    --weight-transfer-config {"backend":"smopd"}""".split()  # noqa: SIM905
SMALL = """--dtype float32 --host 127.0.0.1 --enforce-eager --no-enable-chunked-prefill
    --kv-cache-memory-bytes 33554432""".split()  # noqa: SIM905


class Process:
    """A server `python -m module ... --port`, not started yet, in a process group of its own."""

    def __init__(self, module: str, log: Path, arguments: Sequence[str]):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url, self.log = f"http://127.0.0.1:{port}", log
        self.command = [sys.executable, "-m", module, *arguments, "--port", str(port)]
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        """Start the server unless it runs, and wait until it answers."""
        if self.process is not None:
            return
        environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "TORCHDYNAMO_DISABLE": "1"}
        environment |= {"PYTHONPATH": str(ROOT), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        with self.log.open("ab") as file:
            self.process = subprocess.Popen(
                self.command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        deadline = time.monotonic() + HANG_SECONDS
        while not self.answers():
            alive = self.process.poll() is None and time.monotonic() < deadline
            assert alive, self.log.read_text()[-4000:]
            time.sleep(0.5)

    def answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5.0).is_success
        except httpx.TransportError:
            return False

    def kill(self) -> None:
        """Kill the server and its children at once, as the loss of a machine does."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(60)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()  # lets vLLM free its shared memory
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()


def serve(model: Path, log: Path, *options: str, length: int = 64) -> Process:
    """Start vLLM's server of `model`, small and for a CPU."""
    arguments = ["--model", str(model), "--max-model-len", str(length), *SMALL, *options]
    return Process("vllm.entrypoints.openai.api_server", log, arguments)


@contextmanager
def serving(server: Process) -> Iterator[None]:
    """Run the server inside the context."""
    try:
        server.start()
        yield
    finally:
        server.stop()
