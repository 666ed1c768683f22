"""Servers of vLLM and of our teachers in processes of their own."""

import gc
import multiprocessing
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from functools import partial
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

from smopd.engine.process import CALLER
from tests.patience import HANG_SECONDS
from tests.ranks import FORKS, ROOT, become, environment, start_fork_server

ROLLOUTS = """--enable-scale-out --logprobs-mode processed_logprobs --generation-config vllm
    --worker-extension-cls smopd.engine.vllm.transfer.Extension
    --weight-transfer-config {"backend":"smopd"}""".split()  # noqa: SIM905
SMALL = """--dtype float32 --host 127.0.0.1 --enforce-eager --no-enable-chunked-prefill
    --kv-cache-memory-bytes 33554432""".split()  # noqa: SIM905


class Process:
    """A server `python -m module ... --port`, not started yet, in a process group of its own."""

    def __init__(self, module: str, log: Path, arguments: Sequence[str]):
        port = _free_port()
        self.url, self.log = f"http://127.0.0.1:{port}", log
        self.words = ("-m", module, *arguments, "--port", str(port))
        self.process: BaseProcess | None = None

    def start(self) -> None:
        """Start the server unless it runs, and wait until it answers."""
        if self.process is not None:
            return
        start_fork_server()
        self.process = FORKS.Process(target=_serve, args=(self.words, self.log))
        self.process.start()
        deadline = time.monotonic() + HANG_SECONDS
        while not self.answers():
            alive = self.process.is_alive() and time.monotonic() < deadline
            assert alive, self.log.read_text()[-4000:]
            time.sleep(0.2)

    def answers(self) -> bool:
        try:
            return urlopen(f"{self.url}/health", timeout=5.0).status == 200
        except OSError:
            return False

    def kill(self) -> None:
        """Kill the server and its children at once, as the loss of a machine does."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join(60)

    def stop(self) -> None:
        if self.process is not None and self.process.is_alive():
            self.process.terminate()  # lets vLLM free its shared memory
            self.process.join(60)
            if self.process.is_alive():
                self.kill()


def _free_port() -> int:
    """Return a port below those that systems give to outgoing connections, which may take it meanwhile."""
    while True:
        with suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", port := random.randrange(20_000, 32_000)))
            return port


def _serve(words: tuple[str, ...], log: Path) -> None:
    """Become the server, whose engine is a fork of it."""
    os.setsid()
    start_engines_by(multiprocessing.get_context("fork"))
    own = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
    log.touch()
    become(words, environment() | own, ROOT, [log, log])


def start_engines_by(context: BaseContext) -> None:
    """Have vLLM start its processes in `context`: spawned ones, as on a CPU, import everything once more."""
    from vllm.utils import system_utils

    system_utils.multiprocessing = SimpleNamespace(get_context=lambda _: context)


def fork_engines() -> None:
    """Let engines in processes of their own be forks of the fork server, with this process's environment."""
    start_fork_server()  # here, as interrupts are blocked where an engine is started
    context = copy(FORKS)
    own = partial(FORKS.Process, target=_engine)
    context.Process = lambda target, **options: own(args=(target, dict(os.environ)), **options)
    start_engines_by(context)


def _engine(target: Callable[..., None], variables: dict[str, str], **options: Any) -> None:
    os.environ.clear()
    os.environ.update(variables | {CALLER: str(os.getppid())})
    gc.freeze()
    start_engines_by(multiprocessing.get_context("fork"))
    target(**options)


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
