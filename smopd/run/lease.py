"""The lease, a file with the process and host that use a run directory, because locks may be host-local."""

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from smopd.engine.errors import Failure
from smopd.engine.files import CannotWrite, read_json, write_atomically
from smopd.engine.process import tell
from smopd.record.progress import say

FILE = ".lease"
BEAT_SECONDS = 5.0  # ours
STALE_SECONDS = 20.0  # ours: if a lease is not renewed for this long, its command has ended
TRIES, TRY_SECONDS = 10, 1.0  # ours: a network file system may show a file late


class RunDirLocked(Failure, RuntimeError):
    """The run directory is used by another command, cannot be written, or is not shared by all hosts."""


@contextmanager
def lease(folder: Path) -> Iterator[dict[str, Any]]:
    """Write the lease of a run directory, renew it in a thread, and yield its content.

    If two commands begin at once, the command whose lease is replaced ends itself. A command also ends itself
    if its folder is renamed or removed.

    Raises:
        RunDirLocked: a command on another host renews its lease.
    """
    path = folder / FILE
    _wait_for_other_hosts(path)
    mine = {"host": socket.gethostname(), "boot": _boot(), "pid": os.getpid(), "id": uuid4().hex}
    write_atomically(path, json.dumps(mine).encode())
    done, inode = threading.Event(), folder.stat().st_ino

    def renew() -> None:
        beat = 0
        while not done.wait(BEAT_SECONDS):
            beat, found = beat + 1, _read(path)
            if _moved(folder, inode):
                tell(f"error: {folder} was renamed or removed; rerun with its new path as --output")
                os._exit(1)
            if found.get("id", mine["id"]) != mine["id"]:
                tell(f"error: {folder} was taken over by {_holder(found)}")
                os._exit(1)
            with suppress(OSError, CannotWrite):  # the disk may be full or unreachable for a while
                write_atomically(path, json.dumps({**mine, "beat": beat}).encode())

    thread = threading.Thread(target=renew, name="lease", daemon=True)
    thread.start()
    try:
        yield mine
    finally:
        done.set()
        thread.join()
        with suppress(OSError):
            path.unlink()


def require_shared(folder: Path, held: dict[str, Any]) -> None:
    """Raise RunDirLocked if this host does not find the lease `held` in `folder`."""
    for _ in range(TRIES):
        if _read(folder / FILE).get("id") == held["id"]:
            return
        time.sleep(TRY_SECONDS)
    here = socket.gethostname()
    raise RunDirLocked(f"output: {folder} on {here} is not that of {held['host']}; give a folder they share")


def _wait_for_other_hosts(path: Path) -> None:
    """Raise RunDirLocked if another host renews its lease while this host waits. Clocks are not compared."""
    first, end = _read(path), time.monotonic() + STALE_SECONDS
    here = {"host": socket.gethostname(), "boot": _boot()}
    if not first or here.items() <= first.items():  # on this host, the lock is enough
        return
    say(f"{path.parent}: waiting {STALE_SECONDS:g} seconds to see whether {_holder(first)} is still at work")
    while time.monotonic() < end:
        time.sleep(STALE_SECONDS / TRIES)
        if not (found := _read(path)):
            return
        if found != first:
            raise RunDirLocked(f"{path.parent}: {_holder(first)} is at work there; or give another --output")


def _moved(folder: Path, inode: int) -> bool:
    """Return whether the folder has been replaced or removed, or False while its disk is unreachable."""
    try:
        return folder.stat().st_ino != inode
    except OSError as error:
        return isinstance(error, FileNotFoundError)


def _read(path: Path) -> dict[str, Any]:
    """Return the lease, or {} if it cannot be read."""
    with suppress(OSError, ValueError):
        return read_json(path)
    return {}


def _boot() -> str:
    """Return this host's boot id (Linux), because hosts that are made from one image may have equal names."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _holder(found: dict[str, Any]) -> str:
    return f"process {found.get('pid')} on {found.get('host')}"
