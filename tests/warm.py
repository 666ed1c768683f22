"""Processes that start warm: forks of a Python that has imported what they need.

Importing torch and transformers costs a process four seconds of CPU, and the tests start more than a hundred.
`Popen` and `run` are subprocess's, for commands `[sys.executable, "-m", module, ...]` and `[sys.executable,
file, ...]`: the process has its own id, signals, exit status, environment, folder and children, and is the
caller's child; what torch's launcher starts in it is forked as well. Only the interpreter's start and end are
left out. So in each file of tests one command is started cold, by subprocess.

A nursery is a process that has done the imports and does nothing but fork. A test process has one for each
list of modules that it asks for.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from tests.patience import HANG_SECONDS

ROOT = Path(__file__).resolve().parents[1]
TRAINER = (
    "smopd.run.pipeline",
    "torch.distributed.launcher.api",
    "torch.distributed.run",
    "transformers.models.qwen2.modeling_qwen2",
    "smopd.worlds.models",
)
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class Popen(subprocess.Popen):
    """`preload`: the modules that are imported before it starts, those of the trainer where not given."""

    def __init__(self, args: Sequence[str], *, preload: tuple[str, ...] = TRAINER, **options: Any):
        assert args[0] == sys.executable, args
        self.preload = preload
        super().__init__(args, **options)

    def _execute_child(self, *given: Any) -> None:
        told = inspect.signature(subprocess.Popen._execute_child).bind(self, *given).arguments
        ends = (told["p2cread"], told["c2pwrite"], told["errwrite"])
        streams = [own if end == -1 else end for own, end in zip((0, 1, 2), ends, strict=True)]
        job = {
            "command": told["args"],
            "cwd": os.fspath(told["cwd"] or Path.cwd()),
            "env": dict(told["env"] or os.environ),
            "session": told["start_new_session"],
        }
        if Nursery.serves_here:
            self.pid = fork(job, streams)
        else:
            if self.preload not in NURSERIES:
                NURSERIES[self.preload] = Nursery(self.preload, job["env"])
            self.pid = NURSERIES[self.preload].fork(job, streams)
        self._child_created = True
        self._close_pipe_fds(*(told[name] for name in PIPE_ENDS))


PIPE_ENDS = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def run(
    command: list[str], *, capture_output: bool = False, timeout: float | None = None, **options: Any
) -> subprocess.CompletedProcess:
    """subprocess.run."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(command, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def on_ranks(
    n: int, *words: str, preload: tuple[str, ...] | None = TRAINER, timeout: float = HANG_SECONDS
) -> subprocess.CompletedProcess[str]:
    """Runs `python *words` in `n` processes of torchrun, in one without it, from the checkout's root.

    preload: as of Popen; None: cold.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)] if n > 1 else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *launcher, *words]
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": timeout}
    if preload is None:
        return subprocess.run(command, env=environment, cwd=ROOT, **options)
    return run(command, env=environment, cwd=ROOT, preload=preload, **options)


def fork(job: dict[str, Any], streams: list[int]) -> int:
    """The id of a fork of this process that becomes the command."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        become(job, streams)
    return pid


def become(job: dict[str, Any], streams: list[int]) -> NoReturn:
    """Runs the job as a new Python would, and ends this process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    weakref.finalize._registry.clear()  # what the other process is to tidy up
    if job["session"]:
        os.setsid()
    for own, stream in enumerate(copies := [os.dup(stream) for stream in streams]):
        os.dup2(stream, own)
    for end in {*copies, *streams} - {0, 1, 2}:  # a pipe that its own reader holds never ends
        os.close(end)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False, errors="backslashreplace")
    os.environ.clear()
    os.environ.update(job["env"])
    os.chdir(job["cwd"])
    words = [word for word in job["command"][1:] if word != "-u"]
    paths = [str(Path(path).resolve()) for path in job["env"].get("PYTHONPATH", "").split(os.pathsep) if path]
    is_module = words[0] == "-m"
    first = job["cwd"] if is_module else str(Path(words[0]).resolve().parent)
    sys.path[:] = [first, *paths, *(path for path in sys.path if path not in ("", str(ROOT)))]
    sys.argv = words[1:] if is_module else words
    status = 1
    try:
        if is_module:
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if status and not isinstance(ended.code, int):
            sys.stderr.write(f"{ended.code}\n")
    except KeyboardInterrupt:
        traceback.print_exc()
        status = 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()
            atexit._run_exitfuncs()
            sys.stdout.flush()
        os._exit(status)


class Nursery:
    """A process of its own that has imported `modules`, in the environment of the first that it begins."""

    serves_here = False
    """Whether this process is one, or was begun by one."""

    def __init__(self, modules: tuple[str, ...], environment: dict[str, str]):
        self.asks, theirs = socket.socketpair()
        command = [sys.executable, "-m", "tests.warm", str(theirs.fileno()), *modules]
        environment = environment | {"PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, pass_fds=[theirs.fileno()])
        theirs.close()

    def fork(self, job: dict[str, Any], streams: list[int]) -> int:
        """The id of a new process, a child of this one."""
        orphans(come_here=True)
        try:
            content = json.dumps(job).encode()
            socket.send_fds(self.asks, [len(content).to_bytes(4, "big")], streams)
            self.asks.sendall(content)
            answer = self.asks.recv(8, socket.MSG_WAITALL)
        finally:
            orphans(come_here=False)
        assert len(answer) == 8, f"the nursery ended with status {self.process.wait()}"
        return int.from_bytes(answer, "big")


NURSERIES: dict[tuple[str, ...], Nursery] = {}


def orphans(*, come_here: bool) -> None:
    """Whether Linux makes this process the parent of its children's orphans."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(come_here))


def serve(asks: socket.socket) -> None:
    """Forks until the other end is closed. The child of a child that ends becomes the asking process's."""
    while True:
        head, streams, _, _ = socket.recv_fds(asks, 4, 3)
        if not head:
            return
        job = json.loads(asks.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL))
        reads, writes = os.pipe()
        between = os.fork()
        if between == 0:
            parent, child = os.getpid(), os.fork()
            if child == 0:
                while os.getppid() == parent:
                    time.sleep(0.001)
                asks.close()
                os.close(reads)
                os.close(writes)
                become(job, streams)
            os.write(writes, child.to_bytes(8, "big"))
            os._exit(0)
        os.waitpid(between, 0)
        asks.sendall(os.read(reads, 8))
        for end in (reads, writes, *streams):
            os.close(end)


def main() -> None:
    asks = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2:]:
        importlib.import_module(name)
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    import tests.warm as here  # this file is __main__

    here.Nursery.serves_here = True
    subprocess_handler.Popen = here.Popen
    gc.collect()
    gc.freeze()
    serve(asks)


if __name__ == "__main__":
    main()
