"""Run Python programs, as commands or ranks: most in forks of a process that has imported the trainer."""

import atexit
import gc
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from tests.patience import HANG_SECONDS

ROOT = Path(__file__).resolve().parents[1]
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the fork server, for threads that forks start
FORKS = multiprocessing.get_context("forkserver")
# Importing each takes seconds; vLLM is left out where it is not installed.
VLLM = ("vllm.entrypoints.openai.api_server", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker")
FORKS.set_forkserver_preload(["smopd.run.pipeline", *VLLM])
forks = partial(torch.multiprocessing.start_processes, start_method="forkserver")
"""torch.multiprocessing.spawn in forks."""


def start_fork_server() -> None:
    """Start it as the library imports vLLM on a CPU, or each fork takes seconds to compile functions."""
    with mock.patch.dict(os.environ, {"TORCHDYNAMO_DISABLE": "1"}):
        forkserver._forkserver.ensure_running()


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def python(*words: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `python *words` in a process that imports everything itself."""
    there = {"cwd": cwd, "env": environment() | variables, "timeout": HANG_SECONDS}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, **there)


def become(words: tuple[str, ...], variables: dict[str, str], cwd: Path, output: list[Path]) -> None:
    """Become `python *words`."""
    for descriptor, path in enumerate(output, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), descriptor)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(cwd)
    torch.set_num_threads(1)
    gc.freeze()  # a collection, of which vLLM runs several, takes a second less without what was imported
    forkserver._forkserver.ensure_running = lambda: None  # its own forks come from the server that runs
    try:
        if words[0] == "-m":
            sys.argv[:], sys.path[:0] = words[1:], [str(cwd)]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv[:], sys.path[:0] = words, [str(Path(words[0]).parent)]
            runpy.run_path(words[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # which multiprocessing does not do: vLLM ends its engines there


@contextmanager
def forked(n: int, *words: str, cwd: Path, output: list[Path]) -> Iterator[list[BaseProcess]]:
    """Start `python *words` in `n` forks, ranks as under torchrun if there are several; kill them at the end.

    Appends their stdout and stderr to the two files `output`.
    """
    variables = [environment() for _ in range(n)]
    if n > 1:
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        for rank, own in enumerate(variables):
            own |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            own |= {"WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n), "TORCHELASTIC_RESTART_COUNT": "0"}
            own |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
            own["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    for path in output:
        path.touch()
    start_fork_server()
    forks = [FORKS.Process(target=become, args=(words, own, cwd, output)) for own in variables]
    try:
        for fork in forks:
            fork.start()
        yield forks
    finally:
        for fork in forks:
            fork.kill()
            fork.join()


def wait_until(moment: Callable[[], bool], process: BaseProcess, log: Path) -> None:
    """Wait for the moment in the life of a process."""
    deadline = time.monotonic() + HANG_SECONDS
    while not moment():
        assert process.is_alive() and time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(0.005)


def on_ranks(n: int, *words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run `python *words` in `n` forks until all have ended, or one has failed."""
    deadline = time.monotonic() + HANG_SECONDS
    with tempfile.TemporaryDirectory() as folder:
        output = [Path(folder, "out"), Path(folder, "err")]
        with forked(n, *words, cwd=cwd, output=output) as ranks:
            status: int | None = None
            while not status and (running := [rank.sentinel for rank in ranks if rank.is_alive()]):
                wait(running, deadline - time.monotonic())
                assert time.monotonic() < deadline, output[1].read_text()[-4000:]
                status = next((rank.exitcode for rank in ranks if rank.exitcode), 0)
        out, err = (path.read_text() for path in output)
        return subprocess.CompletedProcess(words, status or 0, out, err)
