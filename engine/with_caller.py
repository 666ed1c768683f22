"""Ends an engine's processes with the process that asked for them, whom a SIGKILL keeps from doing it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

CALLER = "SMOPD_ENGINE_CALLER"
"""The environment variable with the process that an engine of its own process serves."""
PARENT_SECONDS = 1.0  # ours: between looks at whether it lives


def end_with_caller() -> None:
    if CALLER in os.environ:
        end_with(int(os.environ[CALLER]))


def end_with(caller: int) -> None:
    """Ends this process, and vLLM's own between them, soon after `caller`, whom a SIGKILL keeps from it."""
    spawner = multiprocessing.parent_process()
    above = os.getppid()
    between = spawner is not None and spawner.pid == above != caller
    processes = [above, os.getpid()] if between else [os.getpid()]
    threading.Thread(target=_watch, args=(caller, processes), name="end-with-caller", daemon=True).start()


def _watch(caller: int, processes: list[int]) -> None:
    while parent_of(processes[0]) == caller:
        time.sleep(PARENT_SECONDS)
    for process in processes:  # the last is this one
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def parent_of(process: int) -> int | None:
    """None where there is no such process any more."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return None
    return int(status.rpartition(")")[2].split()[1])
