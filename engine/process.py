"""Processes that end with the one that they serve, also where that one is killed. Imports no torch.

`die_with_parent` is Linux's own signal, where the process is a child of the one that it serves.
`end_with_caller` looks once a second instead: vLLM may put a process of its own between, and the signal comes
with the end of the thread that started a process, which for an engine is not always the caller's main one.
"""

from __future__ import annotations

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
"""The environment variable with the process that an engine of its own process serves."""
SAME_SECONDS = 2.0  # ours: a launcher and a whole job's manager may send one signal to a process, both
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""SIGHUP: the terminal is gone. SIGUSR1: Slurm's warning before a time limit (#SBATCH --signal)."""
PARENT_SECONDS = 1.0  # ours: between looks at whether it lives


def stop_signals() -> list[signal.Signals]:
    """Return STOP_SIGNALS without those that are ignored, as SIGHUP under nohup."""
    return [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]


def die_with_parent(parent: int) -> None:
    """Asks Linux to end this process with its parent, `parent`; ends it where that is gone already."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Asks Linux to make this process the parent of what its children leave behind."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_below(process: int) -> None:
    """Kills all that descends from `process`, whatever groups and sessions it has made; not the process."""
    for _ in range(100):  # what is stopped first can start no other; a fork may fall between two looks
        found = below(process)
        for signal_number in (signal.SIGSTOP, signal.SIGKILL):
            for each in found:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(each, signal_number)
        if not found:
            return


def below(process: int) -> list[int]:
    """The children of `process` and theirs that run; Linux."""
    return [each for child in children(process) for each in (child, *below(child))]


def children(process: int) -> list[int]:
    """Those that run; Linux."""
    found: list[int] = []
    with suppress(OSError):  # it may end meanwhile
        for thread in Path(f"/proc/{process}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    return [child for child in found if runs(child)]


def runs(process: int) -> bool:
    """Whether it is there and is no zombie."""
    return _state_and_parent(process)[0] not in ("Z", "X")


def _state_and_parent(process: int) -> tuple[str, int]:
    """Of /proc/PID/stat; ("X", 0) where there is no such process any more."""
    try:
        state, parent = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return "X", 0
    return state, int(parent)


@contextmanager
def interrupts_withheld() -> Iterator[None]:
    """Processes that are started within it never see a SIGINT: a terminal sends one to all of a command's.

    One that comes meanwhile is handled at the end.
    """
    resource_tracker.ensure_running()  # where it has to start, it takes the signal up again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_caller() -> None:
    """Ends this process, and vLLM's own between them, soon after CALLER, which a SIGKILL keeps from it."""
    if CALLER not in os.environ:
        return
    caller, above, spawner = int(os.environ[CALLER]), os.getppid(), multiprocessing.parent_process()
    between = spawner is not None and spawner.pid == above != caller
    processes = [above, os.getpid()] if between else [os.getpid()]

    def watch() -> None:
        while _state_and_parent(processes[0])[1] == caller:
            time.sleep(PARENT_SECONDS)
        for process in processes:  # the last is this one
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    threading.Thread(target=watch, name="end-with-caller", daemon=True).start()
