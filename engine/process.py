"""Processes that end when their parent or caller ends or is killed. This module does not import torch.

`die_with_parent` uses Linux's parent-death signal. `end_with_caller`, for vLLM's engines, polls instead. vLLM
may start an engine through another process, and the signal comes when the thread that started it ends.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
CALLER = "SMOPD_ENGINE_CALLER"
"""Environment variable for the process id of an engine's caller."""
SAME_SECONDS = 2.0
"""Ours: equal signals within this time count as one. A launcher and a job manager may both send it."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""SIGHUP: the terminal is gone. SIGUSR1: Slurm's warning before a time limit (#SBATCH --signal)."""
PARENT_SECONDS = 1.0  # ours: polling interval


def tell(line: str) -> None:
    """Write a line to standard error, or redirect standard error to the null device if its reader is gone."""
    try:
        os.write(2, f"{line}\n".encode("utf-8", "replace"))
    except OSError:
        discard(2)


def discard(descriptor: int) -> None:
    """Redirect `descriptor`, whose reader is gone, to the null device."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def stop_signals() -> list[signal.Signals]:
    """Return STOP_SIGNALS, but without SIGHUP if this process ignores SIGHUP (nohup)."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in STOP_SIGNALS if not (ignored and number == signal.SIGHUP)]


def die_with_parent(parent: int) -> None:
    """Kill this process when its parent, process `parent`, ends (Linux), or now if it has already ended."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Make this process the parent of its orphaned descendants (Linux)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_below(process: int) -> None:
    """Kill all descendants of `process`, in any process group or session."""
    for _ in range(100):  # stopped processes cannot fork, but may have forked before: repeat
        found = below(process)
        for signal_number in (signal.SIGSTOP, signal.SIGKILL):
            for each in found:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(each, signal_number)
        if not found:
            return


def below(process: int) -> list[int]:
    """Return the running descendants of `process` (Linux)."""
    return [each for child in children(process) for each in (child, *below(child))]


def children(process: int) -> list[int]:
    """Return the running children of `process` (Linux)."""
    found: list[int] = []
    with suppress(OSError):  # the process may have ended
        for thread in Path(f"/proc/{process}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    return [child for child in found if runs(child)]


def runs(process: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    return _state_and_parent(process)[0] not in ("Z", "X")


def _state_and_parent(process: int) -> tuple[str, int]:
    """Return state and parent from /proc/PID/stat, or ("X", 0) if there is no such process."""
    try:
        state, parent = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return "X", 0
    return state, int(parent)


@contextmanager
def interrupts_withheld() -> Iterator[None]:
    """Withhold SIGINT from processes started inside. A terminal sends SIGINT to all processes of a command.

    This process itself handles an interrupt when the context ends.
    """
    resource_tracker.ensure_running()  # starting the tracker later would unblock SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_caller() -> None:
    """Start a thread that, after CALLER has ended, kills this process and any vLLM process between them."""
    if CALLER not in os.environ:
        return
    caller, above, spawner = int(os.environ[CALLER]), os.getppid(), multiprocessing.parent_process()
    between = spawner is not None and spawner.pid == above != caller
    processes = [above, os.getpid()] if between else [os.getpid()]

    def watch() -> None:
        while _state_and_parent(processes[0])[1] == caller:
            time.sleep(PARENT_SECONDS)
        for process in processes:  # this process is the last of them
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    threading.Thread(target=watch, name="end-with-caller", daemon=True).start()
